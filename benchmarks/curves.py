"""Learning curves of every algorithm on one data set: tuned on a small grid, then trained with several seeds.

All algorithms get the same model, rounds, cohorts and local sweeps. A setting that is neither in the grid nor among
those has its default. The seed of the tuning is none of those whose curves count.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
import typer

from benchmarks.options import CurvesOptions
from fedcore.algorithms import ALGORITHMS
from fedcore.names import offered
from muster.output import Say
from simulator.configuration import SimulationConfig
from simulator.errors import Diverged
from simulator.simulation import simulate

MODEL, COHORT, EVERY = "mlp", 10, 5
TUNING_SEED = 3
SEEDS = (0, 1, 2)
LAST = 3
"""The accuracy of a training is the mean of its last three measurements: one alone depends on the last cohort."""

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


def run(options: CurvesOptions, say: Say) -> Curves:
    """Tune and train the algorithms one after the other. Raises what a simulation raises, but for Diverged."""
    if options.dataset not in LOCAL_WORK:
        words = f"there are no curves on {options.dataset!r}; {offered(options.dataset, LOCAL_WORK)}"
        raise typer.BadParameter(words, param_hint="--dataset")
    torch.set_num_threads(1)
    start = _cpu_s()
    curves = []
    for name, grid in GRIDS.items():
        say(f"tune {name}")
        tried = [Tried(point, _accuracy(options, name, point)) for point in points(grid)]
        best = max(tried, key=lambda one: one.accuracy or 0.0).settings
        accuracies = []
        for seed in SEEDS:
            say(f"train {name} with seed {seed}")
            accuracies.append(_train(options, name, best, seed))
        family = ALGORITHMS[name].family
        curves.append(Curve(algorithm=name, family=family, settings=best, accuracies=accuracies, tried=tried))
        say(f"{name} {best}: {statistics.fmean(map(final, accuracies)):.3f}", 1)
    return Curves(
        dataset=options.dataset,
        model=MODEL,
        rounds=options.rounds,
        cohort=COHORT,
        local_work=LOCAL_WORK[options.dataset],
        every=EVERY,
        seeds=list(SEEDS),
        tuning_seed=TUNING_SEED,
        cpu_minutes=(_cpu_s() - start) / 60,
        curves=curves,
    )


def _cpu_s() -> float:
    """CPU time of this process and of those that trained for it and have ended."""
    return sum(os.times()[:4])


def final(accuracies: Sequence[float]) -> float:
    """The accuracy of a training: the mean of its last measurements."""
    return statistics.fmean(accuracies[-LAST:])


def points(grid: Mapping[str, Sequence[float]]) -> Iterator[dict[str, float]]:
    """Every combination of the values."""
    return (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))


def _accuracy(options: CurvesOptions, name: str, settings: Mapping[str, float]) -> float | None:
    """The accuracy at a point of the grid; None where the loss is not finite."""
    try:
        return final(_train(options, name, settings, TUNING_SEED))
    except Diverged:
        return None


def _train(options: CurvesOptions, name: str, settings: Mapping[str, float], seed: int) -> list[float]:
    """The accuracies on held-out users in the course of one training."""
    fields = {field.name for field in dataclasses.fields(ALGORITHMS[name])}  # type: ignore[arg-type]
    config = SimulationConfig(
        model=MODEL,
        dataset=options.dataset,
        data=options.data,
        algorithm=name,
        settings={key: value for key, value in LOCAL_WORK[options.dataset].items() if key in fields} | dict(settings),
        rounds=options.rounds,
        cohort=COHORT,
        evaluate_every=EVERY,
        engine="torch",
        seed=seed,
    )
    return [round(point["test.accuracy"], 4) for point in simulate(config).curve]
