"""Users against shuffled examples: how much easier training looks when examples are dealt out at random.

Wang et al. 2021, section 3, ask for experiments on users as they are. Shuffled users have as many examples as before,
drawn from those of all users who train. The users who measure stay the same.
"""

from __future__ import annotations

from typing import Any

from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.partitions import dealt
from simulator.studies.papers import FIELD_GUIDE
from simulator.studies.study import Findings, Plot, Row, Study, Table
from simulator.studies.trainings import curve, finals, measured, rounds_to, settings_in_words, training_on
from simulator.studies.trials import Series, Trials

LOCAL = {
    "digits": {"client_lr": 0.3, "epochs": 5, "batch_size": 20},
    "wisdm": {"client_lr": 0.1, "epochs": 5, "batch_size": 40},
}
TARGETS = {"digits": 0.85, "wisdm": 0.7}
COHORT = 5


def train_split(*, shuffle: bool, seed: int, **config: Any) -> Series:
    """The series of a simulation, on users as they are or shuffled."""
    chosen = SimulationConfig(seed=seed, **config)
    train, test = datasets.load(chosen.dataset, chosen.data).split(chosen.held_out, seed)
    users = (dealt(train, "shuffled", len(train), seed) if shuffle else train), test
    return measured(training_on(users, chosen), chosen.rounds, chosen.evaluate_every)


def _find(trials: Trials) -> Findings:
    rounds, every = (2, 1) if trials.quick else (60, 2)
    tables, plots, setups = [], [], []
    for dataset, settings in LOCAL.items():
        if dataset == "wisdm" and trials.quick:
            continue
        common = {"dataset": dataset, "data": trials.data, "model": "mlp", "rounds": rounds, "evaluate_every": every}
        splits = {"users": False, "shuffled": True}
        cases = [common | {"cohort": COHORT, "settings": settings, "shuffle": shuffle} for shuffle in splits.values()]
        trained = dict(zip(splits, trials.run(train_split, cases), strict=True))
        target = TARGETS[dataset]
        rows: list[Row] = [
            [name, rounds_to(way, target, every), finals(way), finals(way, "low")] for name, way in trained.items()
        ]
        columns = [
            "split",
            f"rounds to accuracy {target}",
            f"accuracy after {rounds} rounds",
            "of the 10th percentile of users",
        ]
        tables.append(Table(title=f"Data {dataset}", columns=columns, rows=rows))
        curves = {name: curve(way, every) for name, way in trained.items()}
        plots.append(Plot(title=f"Data {dataset}", x="round", y="accuracy, unseen users", curves=curves))
        setups.append(f"`{dataset}`: {settings_in_words(settings)}.")
    setup = f"`fedavg` on model `mlp`, cohorts of {COHORT}, {rounds} rounds. {' '.join(setups)}"
    return Findings(setup=setup, tables=tables, plots=plots)


USER_SPLIT = Study(
    "user-split", "How much easier is training where examples are shuffled over users?", FIELD_GUIDE, _find
)
