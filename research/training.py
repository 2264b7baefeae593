"""Studies of training: the accuracy that a budget ε leaves, users' weights, and pseudo-gradients of larger cohorts.

Kairouz et al. 2021 ask it of DP-FTRL and DP-FedAvg. Privacy needs crowds, and data sets of ours have some dozen users:
so the noise on a round's mean is that of a deployment with more devices, as in `muster privacy plan --model`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rules.task_settings import Secagg
from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create
from fedcore.masking import least_square
from fedcore.params import Float32
from fedcore.privacy.accounting import Deployment, calibrated, ways
from fedcore.privacy.settings import Noise
from research import study
from research.study import CHARLES, Findings, Plot, Row, Series, Study, Table, Trials, curve, mean, settings_in_words
from secagg.parameters import least_honest
from simulator import datasets
from simulator.audit import stand_in
from simulator.configuration import HELD_OUT, PrivateTraining, SimulationConfig
from simulator.datasets.partitions import synthetic
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.private_training import PrivateSums, row_of
from simulator.simulation import training_on

POPULATION, PLANNED, SEPARATION, DELTA = 10_000, 100, 10, 1e-5
"""The deployment whose noise is added: devices, of whom so many are in a round, and each in one round of so many."""
ROUNDS, COHORT, EVERY = 40, 20, 4
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
MECHANISMS = ("gaussian", "banded", "distributed")
BITS = 8
"""Of masked values, to which devices add their noise."""
CLIP = 0.5
SETTINGS = {"weighting": "uniform", "batch_size": 10, "epochs": 1, "clip_norm": CLIP}
DATA: dict[str, dict[str, Any]] = {
    "wisdm": {"clients": None, "client_lr": 0.1},
    "digits": {"clients": 200, "client_lr": 0.3},
}


def trained(*, seed: int, dataset: str, data: Path | None, mechanism: str, epsilon: float, rounds: int) -> study.Series:
    """The series of a training of `logreg`; without noise where ε is 0."""
    facts = DATA[dataset]
    users = datasets.load(dataset, data, facts["clients"]).split(HELD_OUT, seed)
    planned = Deployment(POPULATION, PLANNED, ROUNDS, epsilon, DELTA, SEPARATION)
    options: dict[str, Any] = {}
    private = None
    if epsilon and mechanism == "distributed":
        noise = PrivateTraining(noise_multiplier=_of_devices(planned), delta=DELTA, mechanism="distributed")
        secagg = Secagg(clip_norm=CLIP, bits=BITS)
        options = {"privacy": noise, "secagg": secagg, "compress": "rotation"}
    elif epsilon:
        way = next(way for way in ways(planned) if way.mechanism == mechanism)
        private = PrivateSums(stand_in(planned, way, COHORT), seed)
    settings = SETTINGS | {"client_lr": facts["client_lr"]}
    config = SimulationConfig(
        model="logreg",
        dataset=dataset,
        data=data,
        settings=settings,
        rounds=rounds,
        cohort=COHORT,
        seed=seed,
        **options,
    )
    return study.measured(training_on(users, config, private), rounds, EVERY if rounds == ROUNDS else 1)


def _of_devices(planned: Deployment) -> float:
    """The noise multiplier with which devices of a cohort here put the noise of the planned one on a mean.

    In both, all devices add their shares, and the honest ones alone are counted on.
    """
    noise = Noise(noise_multiplier=1.0, mechanism="distributed", min_separation_rounds=SEPARATION)
    multiplier = calibrated(row_of(noise, least_square(BITS)), planned.rounds, planned.epsilon, planned.delta)
    surplus, ours = (size / least_honest(size, size) for size in (planned.cohort, COHORT))
    return multiplier * COHORT / planned.cohort * sqrt(surplus / ours)


def _find(trials: study.Trials) -> study.Findings:
    rounds, epsilons = (2, EPSILONS[-1:]) if trials.quick else (ROUNDS, EPSILONS)
    names = ("digits",) if trials.quick else tuple(DATA)
    tables, plots = [], []
    for name in names:
        cells = [("gaussian", 0.0), *((mechanism, epsilon) for mechanism in MECHANISMS for epsilon in epsilons)]
        common = {"dataset": name, "data": trials.data, "rounds": rounds}
        series = trials.run(trained, [common | {"mechanism": name, "epsilon": epsilon} for name, epsilon in cells])
        ends = dict(zip(cells, map(study.finals, series), strict=True))
        tables.append(_table(name, rounds, epsilons, ends))
        curves = {name: [(epsilon, ends[name, epsilon]) for epsilon in epsilons] for name in MECHANISMS}
        curves["no noise"] = [(epsilon, ends["gaussian", 0.0]) for epsilon in epsilons]
        plots.append(study.Plot(title=f"Data {name}", x="ε", y="accuracy, unseen users", curves=curves, log_x=True))
    rates = f"`client_lr` {DATA['wisdm']['client_lr']} and {DATA['digits']['client_lr']}"
    return study.Findings(
        setup=f"Data `wisdm` with its 28 users, and `digits` over 200; model `logreg`; `fedavg` with "
        f"{study.settings_in_words(SETTINGS)}, {rates}; cohorts of {COHORT}. The noise on a mean is that of {PLANNED} "
        f"devices a round, out of {POPULATION:,}, each in one round of {SEPARATION} at most, for δ = {DELTA:g} after "
        f"{ROUNDS} rounds. distributed: `rotation`, {BITS} bits, one group of secure aggregation.",
        tables=tables,
        plots=plots,
    )


def _table(
    name: str, rounds: int, epsilons: Sequence[float], ends: dict[tuple[str, float], study.PerSeed]
) -> study.Table:
    rows: list[study.Row] = [[f"{epsilon:g}", *(ends[name, epsilon] for name in MECHANISMS)] for epsilon in epsilons]
    rows.append(["no noise", ends["gaussian", 0.0], "", ""])
    columns = ["ε", *MECHANISMS]
    return study.Table(title=f"`{name}`: accuracy after {rounds} rounds", columns=columns, rows=rows)


PRIVATE_TRAINING = study.Study("private-training", "What accuracy does a privacy budget leave?", study.KAIROUZ, _find)


# Weights of users in the mean: by their examples, or all alike.
#
# Wang et al. 2021, section 3: by examples the loss over all examples is minimised, alike that over users. Those who
# train measure too, on examples that they hold out: the weights decide whose loss counts.


LOCAL = {
    "synthetic": {"client_lr": 0.03, "epochs": 1, "batch_size": 50},
    "wisdm": {"client_lr": 0.1, "epochs": 1, "batch_size": 40},
}
WEIGHTINGS = ("examples", "uniform")
DRAWN = 10


def train_weighted(*, seed: int, **config: Any) -> study.Series:
    """The series of a simulation whose users measure on some of their own examples, which they do not train on.

    dataset: "synthetic" for 60 users of synthetic(1, 1), or a data set by name.
    """
    chosen = SimulationConfig(seed=seed, **config)
    users = synthetic(60, seed=seed) if chosen.dataset == "synthetic" else datasets.load(chosen.dataset, chosen.data)
    split = users.split_examples(chosen.held_out, seed)
    return study.measured(training_on(split, chosen), chosen.rounds, chosen.evaluate_every)


def _weigh(trials: study.Trials) -> study.Findings:
    rounds, every = (2, 1) if trials.quick else (30, 2)
    tables, plots, setups = [], [], []
    for dataset, settings in LOCAL.items():
        if dataset == "wisdm" and trials.quick:
            continue
        common = {"dataset": dataset, "data": trials.data, "model": "logreg", "rounds": rounds, "evaluate_every": every}
        cases = [
            common | {"cohort": DRAWN, "settings": settings | {"weighting": weighting}} for weighting in WEIGHTINGS
        ]
        trained = dict(zip(WEIGHTINGS, trials.run(train_weighted, cases), strict=True))
        rows: list[study.Row] = [
            [name, *(study.finals(way, measure) for measure in ("accuracy", "user_mean", "low"))]
            for name, way in trained.items()
        ]
        columns = ["weighting", "accuracy over examples", "mean over users", "10th percentile of users"]
        tables.append(study.Table(title=f"Data {dataset}, after {rounds} rounds", columns=columns, rows=rows))
        curves = {name: study.curve(way, every, "user_mean") for name, way in trained.items()}
        plots.append(study.Plot(title=f"Data {dataset}", x="round", y="accuracy, mean over users", curves=curves))
        setups.append(f"`{dataset}`: {study.settings_in_words(settings)}.")
    setup = (
        f"`fedavg` on model `logreg`, cohorts of {DRAWN}; users hold out a fifth of their examples. {' '.join(setups)}"
    )
    return study.Findings(setup=setup, tables=tables, plots=plots)


WEIGHTING = study.Study("weighting", "Should users weigh by their examples, or all alike?", study.FIELD_GUIDE, _weigh)


# Pseudo-gradients of larger cohorts: their length, and the angles between clients' deltas.
#
# Charles et al. 2021, section 3: with K clients of orthogonal deltas of equal length the mean of them is 1/√K as long.
# A client's delta is measured by a round of its own from the same model.


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


def _compare_angles(trials: Trials) -> Findings:
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
    _compare_angles,
)
