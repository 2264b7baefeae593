"""Learning curves of every algorithm on one data set: tuned on a small grid, then trained with several seeds.

All algorithms get the same model, rounds, cohorts and local sweeps. A setting that is neither in the grid nor among
those has its default. The seed of the tuning is none of those whose curves count.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import typer

from benchmarks.runner import CurvesOptions
from fedcore.algorithms import ALGORITHMS
from fedcore.validation import decoder, offered
from muster.output import Say
from research.study import LAST, Trials, mean, train
from simulator.engines.processes import usable_cores

MODEL, COHORT, EVERY = "mlp", 10, 5
TUNING_SEED = 3
SEEDS = (0, 1, 2)

LOCAL_WORK = {"digits": {"epochs": 3, "batch_size": 20}, "wisdm": {"epochs": 1, "batch_size": 40}}
"""Settings of every algorithm that has them, by data set. Users hold 24 digits, and 60 to 273 windows of WISDM."""

_LR: dict[str, tuple[float, ...]] = {"client_lr": (0.3, 1.0, 3.0)}
_SERVER_LR: dict[str, tuple[float, ...]] = {"client_lr": (0.3, 1.0), "server_lr": (0.01, 0.03, 0.1)}
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "fedavg": _LR,
    "fedadam": _SERVER_LR,
    "mimelite": _LR,
    "fedsgd": {"server_lr": (0.3, 1.0, 3.0)},
    "fedprox": _LR | {"mu": (0.01, 0.1)},
    "fednova": _LR,
    "normfedavg": {"client_lr": (0.3, 1.0), "server_lr": (0.3, 1.0)},
    "fedavgm": {"client_lr": (0.3, 1.0), "server_lr": (0.1, 0.3)},
    "fedadagrad": _SERVER_LR,
    "fedyogi": _SERVER_LR,
    "fedlars": _SERVER_LR,
    "fedlamb": _SERVER_LR,
    "fedpa": {"client_lr": (0.1, 0.3, 1.0)},
    "feddualavg": _LR,
    "mime": _LR,
    "feddane": _LR,
    "fsvrg": {"client_lr": (3.0, 10.0, 30.0, 100.0)},
    "dsvrg": {"client_lr": (0.1, 0.3, 1.0)},
    "localadaalter": _LR,
    "scaffold": _LR,
    "feddyn": {"client_lr": (0.3, 1.0), "alpha": (0.03, 0.1)},
    "fedpd": {"client_lr": (0.3, 1.0), "eta": (10.0, 30.0)},
}
"""What is tried for each algorithm: every combination of these settings."""


class Tried(msgspec.Struct, frozen=True):
    """A point of the grid, and the accuracy there; none where the training diverged."""

    settings: dict[str, float]
    accuracy: float | None


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """An algorithm. settings: the best point of the grid. accuracies: by seed, after `every`, 2 · `every`, … rounds."""

    algorithm: str
    family: str
    settings: dict[str, float]
    accuracies: list[list[float]]
    tried: list[Tried]


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Every algorithm on one data set, with what all have in common.

    local_work: settings of each algorithm that has them. every: rounds between two measurements on the held-out users.
    cpu_minutes: of everything.
    """

    dataset: str
    model: str
    rounds: int
    cohort: int
    local_work: dict[str, int]
    every: int
    seeds: list[int]
    tuning_seed: int
    cpu_minutes: float
    curves: list[Curve]


decode_curves = decoder(Curves).decode


def run(options: CurvesOptions, say: Say) -> Curves:
    """Tune all algorithms, then train them. Raises StudyError when a training fails otherwise than by diverging."""
    if options.dataset not in LOCAL_WORK:
        words = f"there are no curves on {options.dataset!r}; {offered(options.dataset, LOCAL_WORK)}"
        raise typer.BadParameter(words, param_hint="--dataset")
    with TemporaryDirectory(prefix="muster-curves-") as folder:
        tuning, training = (_trials(Path(folder), seeds, say) for seeds in ((TUNING_SEED,), SEEDS))
        grids = [(name, point) for name, grid in GRIDS.items() for point in points(grid)]
        tried: dict[str, list[Tried]] = {name: [] for name in GRIDS}
        for (name, point), (trial,) in zip(grids, _accuracies(tuning, options, grids), strict=True):
            tried[name].append(Tried(point, mean(trial[-LAST:])))
        best = [
            (name, max(points_tried, key=lambda point: point.accuracy or 0.0).settings)
            for name, points_tried in tried.items()
        ]
        trained = _accuracies(training, options, best)
    curves = [
        Curve(
            algorithm=name,
            family=ALGORITHMS[name].family,
            settings=settings,
            accuracies=[[accuracy for accuracy in trial if accuracy is not None] for trial in trials],
            tried=tried[name],
        )
        for (name, settings), trials in zip(best, trained, strict=True)
    ]
    return Curves(
        dataset=options.dataset,
        model=MODEL,
        rounds=options.rounds,
        cohort=COHORT,
        local_work=LOCAL_WORK[options.dataset],
        every=EVERY,
        seeds=list(SEEDS),
        tuning_seed=TUNING_SEED,
        cpu_minutes=(tuning.cpu_s + training.cpu_s) / 60,
        curves=curves,
    )


def final(accuracies: Sequence[float]) -> float:
    """The accuracy of a training: the mean of its last measurements."""
    return statistics.fmean(accuracies[-LAST:])


def points(grid: Mapping[str, Sequence[float]]) -> Iterator[dict[str, float]]:
    """Every combination of the values."""
    return (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))


def _trials(folder: Path, seeds: Sequence[int], say: Say) -> Trials:
    def on_progress(done: int, total: int) -> None:
        say(f"{done} of {total} trainings with the seeds {', '.join(map(str, seeds))}")

    return Trials(folder, seeds=seeds, processes=usable_cores(), on_progress=on_progress)


def _accuracies(
    trials: Trials, options: CurvesOptions, runs: Sequence[tuple[str, Mapping[str, float]]]
) -> list[list[list[float | None]]]:
    """The accuracies on held-out users in the course of trainings, by algorithm and settings, then by seed."""
    cases = []
    for name, settings in runs:
        fields = {field.name for field in dataclasses.fields(ALGORITHMS[name])}  # type: ignore[arg-type]
        work = {key: value for key, value in LOCAL_WORK[options.dataset].items() if key in fields}
        cases.append(
            {
                "model": MODEL,
                "dataset": options.dataset,
                "data": options.data,
                "algorithm": name,
                "settings": work | dict(settings),
                "rounds": options.rounds,
                "cohort": COHORT,
                "evaluate_every": EVERY,
            }
        )
    return [
        [[None if accuracy is None else round(accuracy, 4) for accuracy in series["accuracy"]] for series in by_seed]
        for by_seed in trials.run(train, cases)
    ]
