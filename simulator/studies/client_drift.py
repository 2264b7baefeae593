"""Client drift on quadratics: how far algorithms are from the minimum where clients pull in different directions.

Karimireddy et al. 2020, section 7.1, and 2021. The data are `simulator/datasets/quadratics.py`: the drift of FedAvg
grows with the dissimilarity G, and the start is equally far from the minimum for every G. Gradients have no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.params import Float32
from simulator.cohorts import Cohorts
from simulator.datasets.quadratics import minimum, quadratics
from simulator.engine import Engine
from simulator.errors import Diverged
from simulator.population import Population
from simulator.studies.papers import KARIMIREDDY
from simulator.studies.study import Findings, Plot, Row, Study, Table
from simulator.studies.trainings import curve, last, least
from simulator.studies.trials import Series, Trials

CLIENTS, FEW, DIMENSIONS, CONDITION = 20, 4, 16, 10.0
LOCAL = {"epochs": 5, "batch_size": DIMENSIONS}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedSGD": ("fedsgd", {"batch_size": DIMENSIONS}),
    "FedAvg": ("fedavg", LOCAL),
    "SCAFFOLD": ("scaffold", LOCAL),
    "Mime, SGD": ("mime", LOCAL | {"optimizer": "sgd"}),
    "MimeLite, momentum": ("mimelite", LOCAL | {"optimizer": "momentum"}),
}
DISSIMILARITIES = (1.0, 10.0, 100.0)
RATES = (0.03, 0.1, 0.3, 1.0)
SHOWN = 10.0
"""The dissimilarity at which curves and learning rates are shown."""

Found = dict[tuple[str, float], list[Series]]
"""By name of the algorithm and dissimilarity: the trials with every seed, whose series have learning rates as names."""


def descend(*, way: str, rates: Sequence[float], dissimilarity: float, cohort: int, rounds: int, seed: int) -> Series:
    """Excess losses F(x) − F(x*) by learning rate: before training and after every round, as shares of the first.

    way: one of WAYS. A round is both trips of an algorithm that has two, with one cohort. There are no numbers once
    training has diverged.
    """
    users = quadratics(CLIENTS, dissimilarity, CONDITION, DIMENSIONS, seed)
    algorithm, settings = WAYS[way]
    of_rate = "server_lr" if algorithm == "fedsgd" else "client_lr"
    return {
        f"{rate:g}": _excesses(create(algorithm, settings | {of_rate: rate}), users, cohort, rounds, seed)
        for rate in rates
    }


def _excesses(algorithm: Algorithm, users: Population, cohort: int, rounds: int, seed: int) -> list[float | None]:
    trips = len(trips_of(algorithm))
    cohorts = Cohorts(cohort, same=trips > 1)
    engine = Engine(Model(load_model("least_squares", users.shape), seed), algorithm, users, seed=seed)
    start = _excess(users, engine.state["params"])
    excesses: list[float | None] = [1.0]
    try:
        for number in range(1, trips * rounds + 1):
            engine.run_round(number, cohorts.draw(number, users, seed))
            if number % trips == 0:
                excesses.append(_excess(users, engine.state["params"]) / start)
    except Diverged:
        pass
    return excesses + [None] * (rounds + 1 - len(excesses))


def _excess(users: Population, params_D: Float32) -> float:
    """F(x) − F(x*), without the cancellation of a difference of losses: ½ (x − x*)ᵀ H (x − x*)."""
    outputs_N = users.fields["x"].astype(np.float64) @ (params_D - minimum(DIMENSIONS))
    return float((outputs_N**2).mean() / 2)


def _find(trials: Trials) -> Findings:
    rounds, rates, dissimilarities = (3, RATES[1:2], (SHOWN,)) if trials.quick else (40, RATES, DISSIMILARITIES)
    series = {cohort: _trained(trials, cohort, rounds, rates, dissimilarities) for cohort in (CLIENTS, FEW)}
    return Findings(
        setup=f"{CLIENTS} clients with quadratic losses in {DIMENSIONS} dimensions, condition {CONDITION:g}; {rounds} "
        f"rounds of {LOCAL['epochs']} local steps on all examples, one step for FedSGD. A round of Mime is both of its "
        f"trips. Losses are shares of that at the start. Each algorithm has the best learning rate of "
        f"{', '.join(map(str, rates))} for the dissimilarity, by the mean after the last round.",
        tables=[
            _tuned(series[CLIENTS], dissimilarities, f"Excess loss, all {CLIENTS} clients in every round"),
            _tuned(series[FEW], dissimilarities, f"Excess loss, {FEW} of {CLIENTS} clients in every round"),
            Table(
                title=f"Excess loss by learning rate at G = {SHOWN:g}, all {CLIENTS} clients in every round",
                columns=["learning rate", *WAYS],
                rows=[
                    [f"{rate:g}", *(last(series[CLIENTS][name, SHOWN], f"{rate:g}") for name in WAYS)] for rate in rates
                ],
            ),
        ],
        plots=[_curves(series[cohort], f"Excess loss at G = {SHOWN:g}, {cohort} clients a round") for cohort in series],
    )


def _trained(
    trials: Trials, cohort: int, rounds: int, rates: Sequence[float], dissimilarities: Sequence[float]
) -> Found:
    keys = [(name, dissimilarity) for name in WAYS for dissimilarity in dissimilarities]
    common = {"rates": rates, "cohort": cohort, "rounds": rounds}
    cases = [{"way": name, "dissimilarity": dissimilarity} | common for name, dissimilarity in keys]
    return dict(zip(keys, trials.run(descend, cases), strict=True))


def _tuned(series: Found, dissimilarities: Sequence[float], title: str) -> Table:
    rows: list[Row] = []
    for name in WAYS:
        by_dissimilarity = [(series[name, g], least(series[name, g], "")) for g in dissimilarities]
        rates = ", ".join(rate for _, rate in by_dissimilarity)
        rows.append([name, *(last(trained, rate) for trained, rate in by_dissimilarity), rates])
    columns = ["algorithm", *(f"G = {g:g}" for g in dissimilarities), "learning rates"]
    return Table(title=title, columns=columns, rows=rows)


def _curves(series: Found, title: str) -> Plot:
    shown = {name: series[name, SHOWN] for name in WAYS}
    curves = {name: curve(trained, 1, least(trained, ""), start=0) for name, trained in shown.items()}
    return Plot(title=title, x="round", y="excess loss", curves=curves, log_y=True)


CLIENT_DRIFT = Study(
    "client-drift",
    "How far does client drift keep algorithms from the minimum when clients differ?",
    KARIMIREDDY,
    _find,
)
