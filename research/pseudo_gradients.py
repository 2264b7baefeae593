"""Pseudo-gradients of larger cohorts: their length, and the angles between clients' deltas.

Charles et al. 2021, section 3: with K clients of orthogonal deltas of equal length the mean of them is 1/√K as long.
A client's delta is measured by a round of its own from the same model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create
from fedcore.params import Float32
from research.study import CHARLES, Findings, Plot, Row, Series, Study, Table, Trials, curve, mean, settings_in_words
from simulator import datasets
from simulator.engine import Engine
from simulator.engines.computing import Computing

COHORTS = (5, 10, 20, 40, 80)
WAYS = {
    "fedavg": {"client_lr": 0.3, "epochs": 3, "batch_size": 20, "weighting": "uniform"},
    "fedsgd": {"server_lr": 0.3, "weighting": "uniform"},
}


def lengths(*, algorithm: str, cohorts: Sequence[int], rounds: int, seed: int) -> Series:
    """In every round of a training: the length of the mean delta of each cohort, and the mean cosine of two deltas.

    The cohort of a round is the first so many of one drawing. Training goes on with the largest.
    """
    train, _ = datasets.load("digits", clients=100).split(0.2, seed)
    model = Model(load_model("mlp", train.shape, train.classes), seed)
    engine = Engine(model, create(algorithm, WAYS[algorithm]), train, seed=seed, computing=Computing())
    series: Series = {name: [] for name in ("cosine", *map(str, cohorts))}
    for number in range(1, rounds + 1):
        chosen = train.sample(max(cohorts), seed, number)
        start = engine.state
        deltas_KD = np.stack([_delta(engine, start, number, slot, client) for slot, client in enumerate(chosen)])
        for cohort in cohorts:
            series[str(cohort)].append(float(np.linalg.norm(deltas_KD[:cohort].mean(0))))
        series["cosine"].append(mean_cosine(deltas_KD))
        engine.restore(start)
        engine.run_round(number, chosen)
    return series


def _delta(engine: Engine, start: dict[str, Float32], number: int, slot: int, client: int) -> Float32:
    """How far a client moves the model that a round starts from."""
    engine.restore(start)
    engine.run_round(number, [client], [slot])
    return engine.state["params"] - start["params"]


def mean_cosine(deltas_KD: Float32) -> float:
    """The mean cosine of the angle between two of K vectors."""
    units_KD = deltas_KD / np.linalg.norm(deltas_KD, axis=1, keepdims=True)
    count = len(units_KD)
    return float((np.linalg.norm(units_KD.sum(0)) ** 2 - count) / (count * (count - 1)))


def _find(trials: Trials) -> Findings:
    cohorts, rounds = (COHORTS[:2], 2) if trials.quick else (COHORTS, 20)
    measured = trials.run(lengths, [{"algorithm": name, "cohorts": cohorts, "rounds": rounds} for name in WAYS])
    ways = {
        name: [[mean(trial[str(cohort)]) or math.nan for cohort in cohorts] for trial in trials_of_way]
        for name, trials_of_way in zip(WAYS, measured, strict=True)
    }
    by_cohort: list[Row] = [
        [str(cohort), *([means[index] for means in way] for way in ways.values())]
        for index, cohort in enumerate(cohorts)
    ]
    powers = [[float(np.polyfit(np.log(cohorts), np.log(means), 1)[0]) for means in way] for way in ways.values()]
    cosines: list[Row] = [
        [words, *([trial["cosine"][at] for trial in way] for way in measured)]
        for words, at in (("first", 0), ("last", -1))
    ]
    falls = {
        name: [(float(cohort), [means[index] / means[0] for means in way]) for index, cohort in enumerate(cohorts)]
        for name, way in ways.items()
    }
    orthogonal = {"orthogonal deltas": [(float(cohort), [math.sqrt(cohorts[0] / cohort)]) for cohort in cohorts]}
    return Findings(
        setup=f"Data `digits` over 100 users, 80 of them for training; model `mlp`; {rounds} rounds. "
        + "; ".join(f"`{name}` with {settings_in_words(settings)}" for name, settings in WAYS.items())
        + ".",
        tables=[
            Table(
                title="Length of the mean delta by cohort, mean over rounds",
                columns=["cohort", *WAYS],
                rows=[*by_cohort, ["power of the cohort", *powers]],
            ),
            Table(title="Mean cosine of the deltas of two users", columns=["round", *WAYS], rows=cosines),
        ],
        plots=[
            Plot(
                title="Length of the mean delta",
                x="cohort",
                y=f"times that of {cohorts[0]}",
                curves=falls | orthogonal,
                log_x=True,
                log_y=True,
            ),
            Plot(
                title="Cosine of the deltas of two users",
                x="round",
                y="mean cosine",
                curves={name: curve(way, 1, "cosine") for name, way in zip(WAYS, measured, strict=True)},
            ),
        ],
    )


PSEUDO_GRADIENTS = Study(
    "pseudo-gradients",
    "How does the length of the mean delta fall with the cohort, and why?",
    CHARLES,
    _find,
)
