"""Client optimizers: SGD, momentum and Adam, whose state starts anew in every round, each with its best learning rate.

Wang et al. 2021, section 3: an adaptive optimizer helps on clients as elsewhere, if its state is handled with care.
"""

from __future__ import annotations

from simulator.studies.papers import FIELD_GUIDE
from simulator.studies.study import Findings, Plot, Row, Study, Table, mean
from simulator.studies.trainings import curve, finals, settings_in_words, train
from simulator.studies.trials import Trials

RATES = {
    "sgd": (0.1, 0.3, 1.0, 3.0),
    "momentum": (0.01, 0.03, 0.1, 0.3),
    "adam": (0.001, 0.003, 0.01, 0.03),
}
LOCAL = {"digits": {"epochs": 3, "batch_size": 20}, "wisdm": {"epochs": 1, "batch_size": 40}}
COHORT = 10


def _find(trials: Trials) -> Findings:
    rounds, every, size = (2, 1, 1) if trials.quick else (40, 2, 4)
    tables, plots, setups = [], [], []
    for dataset, local in LOCAL.items():
        if dataset == "wisdm" and trials.quick:
            continue
        common = {"dataset": dataset, "data": trials.data, "model": "mlp", "rounds": rounds, "evaluate_every": every}
        cells = [(name, rate) for name, rates in RATES.items() for rate in rates[:size]]
        cases = [
            common | {"cohort": COHORT, "settings": local | {"client_optimizer": name, "client_lr": rate}}
            for name, rate in cells
        ]
        trained = dict(zip(cells, trials.run(train, cases), strict=True))
        rows: list[Row] = []
        curves = {}
        for name, rates in RATES.items():
            ways = {rate: trained[name, rate] for rate in rates[:size]}
            best = max(ways, key=lambda rate: mean(finals(ways[rate])) or 0.0)
            rows += [[name, f"{rate:g}", finals(way), "best" if rate == best else ""] for rate, way in ways.items()]
            curves[f"{name}, {best:g}"] = curve(ways[best], every)
        columns = ["client optimizer", "client_lr", f"accuracy after {rounds} rounds", ""]
        tables.append(Table(title=f"Data {dataset}", columns=columns, rows=rows))
        plots.append(Plot(title=f"Data {dataset}", x="round", y="accuracy, unseen users", curves=curves))
        setups.append(f"`{dataset}`: {settings_in_words(local)}.")
    setup = f"`fedavg` on model `mlp`, cohorts of {COHORT}, {rounds} rounds. {' '.join(setups)}"
    return Findings(setup=setup, tables=tables, plots=plots)


CLIENT_OPTIMIZERS = Study("client-optimizers", "Which optimizer should clients run?", FIELD_GUIDE, _find)
