"""Sweeps: many runs, each in a process and a folder of its own; those that ended are kept, those that began go on."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from fedcore.decoding import decoder
from simulator import datasets
from simulator.engines.workers.forked import with_kept
from simulator.errors import Diverged, RunError, SimulatorError
from simulator.runs.config_file import differences
from simulator.runs.folder import locked
from simulator.runs.reading import CONFIG, RESULT, read_config, read_result
from simulator.runs.running import resume_run, start_run
from simulator.runs.sweep_file import SweepRun
from simulator.simulation import SimulationResult, check_users

Status = Literal["done", "diverged", "failed"]
RUNS = "runs"
SEED = "seed"


class _End(msgspec.Struct, frozen=True):
    """How a run ended in its process, and why."""

    status: Status
    why: str = ""


_END = decoder(_End)


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """What came of a run of a sweep. why: it is not done; a run fails when its process raises or is killed.

    One that diverged has a result if its numbers stayed finite.
    """

    run: SweepRun
    status: Status
    result: SimulationResult | None = None
    why: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """The run as a row of a table: its varied options, and its figures."""
        result = self.result
        return {
            **self.run.varied,
            "status": self.status,
            "rounds": result and result.rounds,
            "ended_by": result and result.ended_by,
            "test_accuracy": result and result.test_accuracy,
            "test_loss": result and result.test_loss,
            "user_mean": result and result.user_mean,
            "user_p5": result and result.per_user["p5"],
            "run": f"{RUNS}/{self.run.name}",
        }


def run_sweep(
    runs: Sequence[SweepRun],
    folder: Path,
    processes: int,
    on_end: Callable[[SweepOutcome], None] = lambda outcome: None,
) -> list[SweepOutcome]:
    """Run all that has no result yet, each in `folder`/runs/NAME; gives the outcomes in the order of the runs.

    processes: how many run at a time. on_end: called with every outcome when it is there. A run that fails or is killed
    keeps none of the others from running. Raises RunError, before any run, when another sweep is at work in the folder,
    when users of a run cannot be read or are too few, or when the folder of a run is that of another configuration:
    names of folders say only what varies.
    """
    _check_kept(runs, folder)
    _check_users([run for run in runs if not (folder / RUNS / run.name).exists()])
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, SweepOutcome] = {}
    with contextlib.closing(locked(folder)):
        paths = [folder / RUNS / run.name for run in runs]
        kept = [_End("done") if (path / RESULT).exists() else None for path in paths]
        work = [functools.partial(_run, run, path) for run, path in zip(runs, paths, strict=True)]
        for index, ended in with_kept(kept, work, _END, processes):
            end = _End("failed", str(ended)) if isinstance(ended, Exception) else ended
            result = read_result(paths[index]) if end.status == "done" else None
            if result is not None and result.diverged is not None:
                end = _End("diverged", result.diverged)
            outcome = SweepOutcome(runs[index], end.status, result, end.why)
            outcomes[outcome.run.name] = outcome
            on_end(outcome)
    return [outcomes[run.name] for run in runs]


def means_over_seeds(outcomes: Sequence[SweepOutcome]) -> list[dict[str, Any]]:
    """A row for each choice of the varied options but the seed: mean figures of the runs that are done.

    `seeds` is how many those are, `deviation` the standard deviation of their accuracy.
    """
    groups: dict[tuple[Any, ...], list[SweepOutcome]] = {}
    for outcome in outcomes:
        key = tuple((name, value) for name, value in outcome.run.varied.items() if name != SEED)
        groups.setdefault(key, []).append(outcome)
    rows = []
    for key, group in groups.items():
        done = [outcome.result for outcome in group if outcome.result is not None]
        accuracies = [result.test_accuracy for result in done if result.test_accuracy is not None]
        rows.append(
            dict(key)
            | {
                "seeds": len(done),
                "test_accuracy": statistics.fmean(accuracies) if accuracies else None,
                "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "test_loss": statistics.fmean(result.test_loss for result in done) if done else None,
                "user_p5": statistics.fmean(result.per_user["p5"] for result in done) if done else None,
                "without a result": len(group) - len(done),
            }
        )
    return rows


def _check_kept(runs: Sequence[SweepRun], folder: Path) -> None:
    if (folder / CONFIG).exists():
        raise RunError(f"{folder} is the folder of a run; take another folder with --out")
    for run in runs:
        path = folder / RUNS / run.name
        different = differences(read_config(path), run.config) if path.exists() else []
        if different:
            raise RunError(
                f"{path} is of a sweep with other options; its run and the one that is asked for differ in "
                f"{', '.join(different)}. Take another folder with --out, or delete this one"
            )


def _check_users(runs: Sequence[SweepRun]) -> None:
    """Raise RunError where users cannot be read, or are too few. Those that runs share are read once."""
    load = functools.cache(datasets.load)
    for run in runs:
        config = run.config
        try:
            users = run.given.users or load(config.dataset, config.data, config.clients, config.partition)
            check_users(config, users)
        except SimulatorError as error:
            raise RunError(f"the run {run.name} cannot be: {error}") from error


def _run(run: SweepRun, path: Path) -> _End:
    try:
        if path.exists():
            resume_run(path, run.config)
        else:
            start_run(path, run.config, given=run.given)
    except Diverged as error:
        return _End("diverged", str(error))
    return _End("done")
