"""Private training: the accuracy that a budget ε leaves, by mechanism.

Kairouz et al. 2021 ask it of DP-FTRL and DP-FedAvg. Privacy needs crowds, and data sets of ours have some dozen users:
so the noise on a round's mean is that of a deployment with more devices, as in `muster privacy plan --model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from coordinator.rules.task_settings import Secagg
from fedcore.masking import least_square
from fedcore.privacy.accounting import Deployment, calibrated, ways
from fedcore.privacy.settings import Noise
from research import study
from secagg.parameters import least_honest
from simulator import datasets
from simulator.audit import stand_in
from simulator.configuration import HELD_OUT, PrivateTraining, SimulationConfig
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
