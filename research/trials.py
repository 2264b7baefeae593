"""Trials of a study: measurements with several seeds, in parallel processes; those that were done are kept in files."""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from fedcore.decoding import UNDECODABLE, decoder
from fedcore.private_files import write_whole
from simulator.engines.workers.forked import with_kept
from simulator.errors import StudyError

Series = dict[str, list[float | None]]
"""Numbers by name; None, in JSON as here, stands for a number that does not exist, and NaN becomes None."""
Case = Mapping[str, Any]
"""The arguments of a trial by name: values that JSON can hold, or paths."""
Progress = Callable[[int, int], None]


class _Trial(msgspec.Struct, frozen=True):
    """A finished trial. cpu_s: its CPU time."""

    series: Series
    cpu_s: float


_TRIAL = decoder(_Trial)


class Trials:
    """Runs trials for a study.

    folder: keeps finished trials, so that a study which was interrupted goes on where it was. A trial is known again by
    its function, the source file of that, its case and its seed; after a change of other code delete the folder.
    seeds: every case is run with each. quick: whether the study should take its smallest sizes. data: the folder that
    holds data sets on disk. on_progress: called with the numbers of finished trials and of all that were asked for.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seeds: Sequence[int] = (0, 1, 2),
        quick: bool = False,
        data: Path | None = None,
        processes: int = 1,
        on_progress: Progress = lambda done, total: None,
    ) -> None:
        self.seeds, self.quick, self.data = tuple(seeds), quick, data
        self.cpu_s = 0.0
        self._folder, self._processes, self._on_progress = folder, processes, on_progress
        self._done = self._total = 0

    def run(self, measure: Callable[..., Series], cases: Sequence[Case]) -> list[list[Series]]:
        """What `measure(**case, seed=seed)` gives for each case, by seed.

        Each trial runs in a process of its own. Raises StudyError when a trial fails, with its case, its seed, and the
        words of what it raised.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        runs = [(case, seed) for case in cases for seed in self.seeds]
        paths = [self._folder / f"{_digest(measure, case, seed)}.json" for case, seed in runs]
        kept = [_read(path) for path in paths]
        self._total += len(runs)
        self._on_progress(self._done, self._total)
        if None in kept:
            import_module("torch._dynamo")  # torch.func loads it when it is first used: here once, not in every process
        computations = [functools.partial(_measured, measure, *run) for run in runs]
        series: dict[int, Series] = {}
        for index, trial in with_kept(kept, computations, _TRIAL, self._processes):
            if isinstance(trial, Exception):
                raise _failed(*runs[index], trial) from trial
            if kept[index] is None:
                write_whole(paths[index], msgspec.json.encode(trial))
            series[index] = trial.series
            self.cpu_s += trial.cpu_s
            self._done += 1
            self._on_progress(self._done, self._total)
        in_order = (series[index] for index in range(len(runs)))
        return [[next(in_order) for _ in self.seeds] for _ in cases]


def _measured(measure: Callable[..., Series], case: Case, seed: int) -> _Trial:
    series = measure(**case, seed=seed)
    return _Trial(series, time.process_time())


def _failed(case: Case, seed: int, error: Exception) -> StudyError:
    words = ", ".join(f"{name} {value}" for name, value in [*case.items(), ("seed", seed)])
    return StudyError(f"the trial with {words} failed: {error}")


def _digest(measure: Callable[..., Series], case: Case, seed: int) -> str:
    """What a trial is known by."""
    source = hashlib.sha256(Path(inspect.getfile(measure)).read_bytes()).hexdigest()
    identity = [measure.__qualname__, source, dict(case), seed]
    return hashlib.sha256(msgspec.json.encode(identity, enc_hook=str, order="sorted")).hexdigest()[:24]


def _read(path: Path) -> _Trial | None:
    """A trial that is kept; None where there is none, or a damaged one."""
    try:
        return _TRIAL.decode(path.read_bytes())
    except (OSError, *UNDECODABLE):
        return None
