"""Federated optimization of a sparse logistic problem: how near methods come to the optimum in few rounds.

Konečný et al. 2016, section 4, with the data of `simulator/datasets/sparse_logistic.py`. All users take part in every
round. Examples are either their users' own, or dealt out at random to users with as many ("reshuffled").
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.model import Model, ModelSpec
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import trips_of
from fedcore.plan import Field
from simulator.baselines.dane import Dane
from simulator.baselines.linear import Array, LinearProblem
from simulator.baselines.method import order_of
from simulator.baselines.sparse_fsvrg import SparseFsvrg
from simulator.datasets.sparse_logistic import sparse_logistic
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.partitions import dealt
from simulator.population import Population
from simulator.studies.papers import KONECNY
from simulator.studies.study import Findings, Plot, Row, Study, Table
from simulator.studies.trainings import curve, last, least
from simulator.studies.trials import Series, Trials

USERS, FEATURES, ROUNDS, HELD_OUT = 100, 500, 25, 0.25
SPLITS = ("by user", "reshuffled")


class _Logistic(nn.Module):
    """The output ⟨w, x⟩, and ‖w‖² beside it, so that the loss can hold the regularisation."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        outputs = x @ self.weights
        return torch.stack([outputs, (self.weights**2).sum().expand_as(outputs)], 1)


def regularised_logistic(features: int, l2: float) -> ModelSpec:
    """Logistic regression with the loss log(1 + exp(−y ⟨w, x⟩)) + l2/2 ‖w‖², y = ±1 for the classes 1 and 0."""

    def loss(outputs: Tensor, label: Tensor) -> Tensor:
        return nn.functional.softplus((1 - 2 * label) * outputs[:, 0]) + l2 / 2 * outputs[:, 1]

    inputs = (Field("x", "float32", (features,)),)
    return ModelSpec("regularised_logistic", lambda: _Logistic(features), loss, inputs, Field("y", "int64", high=2))


@dataclass(frozen=True, slots=True)
class Problem:
    """The training examples of all users, the held-out ones, and the same as a linear problem. seed: of all orders."""

    train: Population
    test: Population
    linear: LinearProblem
    seed: int

    def excess(self, weights_D: Array, optimum_D: Array) -> float:
        """F(w) − F(w*) as a share of that at w = 0."""
        value, least = (self.linear.value(w_D[:, None]) for w_D in (weights_D, optimum_D))
        return (value - least) / (math.log(2) - least)

    def optimum(self) -> Array:
        """w*, (D,): DANE with one client is Newton's method."""
        of = self.linear
        pooled = LinearProblem(of.loss, of.features, of.targets, of.starts[[0, -1]], of.l2)
        newton = Dane(l2=of.l2, mu=0.0)
        weights_D: Array = newton.step(pooled, newton.init(pooled), order_of(self.seed, 1))[:, 0]
        return weights_D

    def error(self, weights_D: Array) -> float:
        """The share of held-out examples that are classified wrongly."""
        positive_N = self.test.fields["x"].astype(np.float64) @ weights_D > 0
        return float((positive_N != self.test.fields["y"]).mean())


def problem(split: str, users: int, seed: int) -> Problem:
    """A problem; the examples, and so F, are the same for both splits."""
    train, test = sparse_logistic(users, FEATURES, seed).split_examples(HELD_OUT, seed)
    if split == "reshuffled":
        train = dealt(train, "shuffled", len(train), seed)
    x, y = train.fields["x"].astype(np.float64), 2.0 * train.fields["y"].astype(np.float64) - 1
    return Problem(train, test, LinearProblem("logistic", x, y[:, None], train.starts, 1 / len(x)), seed)


def _engine(of: Problem, algorithm: str, settings: dict[str, Any]) -> Iterator[Array]:
    """The weights after every round of an algorithm, both trips where it has two."""
    optimizer = create(algorithm, settings)
    model, together = Model(regularised_logistic(FEATURES, of.linear.l2)), Computing(at_once=len(of.train))
    engine = Engine(model, optimizer, of.train, seed=of.seed, computing=together)
    trips = len(trips_of(optimizer))
    for number in itertools.count(1):
        engine.run_round(number, range(len(of.train)))
        if number % trips == 0:
            yield engine.state["params"].astype(np.float64)


def _fsvrg(of: Problem, rate: float, *, scaled: bool) -> Iterator[Array]:
    """The weights after every round of FSVRG; without its scaling it is the engine's `fsvrg`, and faster here."""
    method = SparseFsvrg(l2=of.linear.l2, lr=rate, scaled=scaled)
    weights_D1 = method.init(of.linear)
    for number in itertools.count(1):
        weights_D1 = method.step(of.linear, weights_D1, order_of(of.seed, number))
        yield weights_D1[:, 0]


LARGEST = 512
"""A batch that holds all examples of any user."""
DSVRG_STEPS = 10


@dataclass(frozen=True, slots=True)
class Way:
    """A method: its weights after every round at a learning rate, and the rates that are tried."""

    run: Callable[[Problem, float], Iterator[Array]]
    rates: tuple[float, ...]


WAYS = {
    "GD": Way(lambda of, rate: _engine(of, "fedsgd", {"server_lr": rate, "batch_size": LARGEST}), (2.0, 5.0, 10.0)),
    "DSVRG": Way(
        lambda of, rate: _engine(
            of,
            "dsvrg",
            {"client_lr": rate, "steps": DSVRG_STEPS, "sweep_batch_size": LARGEST, "weighting": "examples"},
        ),
        (0.2, 0.5, 1.0),
    ),
    "FSVRG, not scaled": Way(functools.partial(_fsvrg, scaled=False), (2.0, 5.0, 10.0, 20.0, 50.0)),
    "FSVRG": Way(functools.partial(_fsvrg, scaled=True), (2.0, 5.0, 10.0, 20.0, 50.0)),
}


def optimise(*, way: str, split: str, users: int, rounds: int, seed: int) -> Series:
    """By learning rate, at the start and after every round: `excess RATE` and `error RATE`, of held-out examples.

    `least` is the error of the optimum.
    """
    of = problem(split, users, seed)
    optimum_D = of.optimum()
    series: Series = {"least": [of.error(optimum_D)]}
    for rate in WAYS[way].rates:
        weights = [np.zeros(FEATURES), *itertools.islice(WAYS[way].run(of, rate), rounds)]
        series[f"excess {rate:g}"] = [of.excess(weights_D, optimum_D) for weights_D in weights]
        series[f"error {rate:g}"] = [of.error(weights_D) for weights_D in weights]
    return series


def _find(trials: Trials) -> Findings:
    users, rounds = (6, 2) if trials.quick else (USERS, ROUNDS)
    keys = [(way, split) for way in WAYS for split in SPLITS]
    cases = [{"way": way, "split": split, "users": users, "rounds": rounds} for way, split in keys]
    series = dict(zip(keys, trials.run(optimise, cases), strict=True))
    best = {key: least(trained, "excess ") for key, trained in series.items()}
    excesses: list[Row] = [
        [
            way,
            *(last(series[way, split], f"excess {best[way, split]}") for split in SPLITS),
            *(best[way, split] for split in SPLITS),
        ]
        for way in WAYS
    ]
    errors: list[Row] = [
        [way, *(last(series[way, split], f"error {best[way, split]}") for split in SPLITS)] for way in WAYS
    ]
    of_optimum = last(series[keys[0]], "least")
    return Findings(
        setup=f"{users} users, {FEATURES} features, l2 = 1/n; three quarters of each user's examples train, the others "
        f"measure. {rounds} rounds of all users; a round of DSVRG and FSVRG is both of their trips. DSVRG takes "
        f"{DSVRG_STEPS} steps of one example a round, FSVRG one sweep. Each method has the step size with the least "
        "excess loss after the last round.",
        tables=[
            Table(
                title=f"Excess loss after {rounds} rounds, as a share of that at the start",
                columns=["method", *SPLITS, *(f"step size, {split}" for split in SPLITS)],
                rows=excesses,
            ),
            Table(
                title=f"Error on held-out examples after {rounds} rounds",
                columns=["method", *SPLITS],
                rows=[*errors, ["optimum", of_optimum, of_optimum]],
            ),
        ],
        plots=[
            _plot(series, best, "excess", "Excess loss", log_y=True),
            _plot(series, best, "error", "Error on held-out examples"),
        ],
    )


def _plot(
    series: dict[tuple[str, str], list[Series]], best: dict[tuple[str, str], str], name: str, title: str, **how: bool
) -> Plot:
    """A series by round: of GD, which knows no users, once, and of the others for both splits."""
    curves = {}
    for (way, split), trained in series.items():
        if (way, split) != ("GD", "reshuffled"):
            label = way if way == "GD" else f"{way}, {split}"
            curves[label] = curve(trained, 1, f"{name} {best[way, split]}", start=0)
    return Plot(title=title, x="round", y=title.lower(), curves=curves, **how)


FEDERATED_OPTIMIZATION = Study(
    "federated-optimization",
    "Which methods near the optimum of a sparse problem in few rounds, by user and reshuffled?",
    KONECNY,
    _find,
)
