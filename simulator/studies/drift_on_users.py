"""Client drift on real users: corrections of local steps against momentum and Adam on the server alone.

Karimireddy et al. 2021, section 7: Mime and MimeLite take the server's momentum or Adam into local steps, where FedAvgM
and FedAdam apply it to the mean delta. SCAFFOLD's control variates are old where users take part rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from export.model import ModelSpec
from export.models.char_lstm import CharLstm
from export.models.tasks import next_token
from simulator import datasets
from simulator.configuration import HELD_OUT, SimulationConfig
from simulator.population import Population
from simulator.studies.papers import MIME
from simulator.studies.study import Findings, PerSeed, Plot, Row, Study, Table, mean
from simulator.studies.trainings import curve, finals, least, measured, training_on
from simulator.studies.trials import Series, Trials

LENGTH, WINDOWS, HIDDEN = 40, 12, 64
UNIFORM = {"weighting": "uniform"}


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm with its settings, the one of them that is tuned, and the values that are tried.

    of_task: whether the values are multiples of the task's learning rate, that of SGD. trips: of a round.
    """

    algorithm: str
    settings: Mapping[str, Any]
    tuned: str = "client_lr"
    values: tuple[float, ...] = (0.3, 1.0, 3.0)
    of_task: bool = True
    trips: int = 1


WAYS = {
    "FedAvg": Way("fedavg", UNIFORM),
    "FedAvgM": Way("fedavgm", UNIFORM | {"server_lr": 0.3}),
    "FedAdam": Way("fedadam", UNIFORM, "server_lr", (0.003, 0.01, 0.03), of_task=False),
    "SCAFFOLD": Way("scaffold", {}),
    "Mime, momentum": Way("mime", {"optimizer": "momentum"}, trips=2),
    "MimeLite, momentum": Way("mimelite", {"optimizer": "momentum"}),
    "MimeLite, Adam": Way("mimelite", {"optimizer": "adam"}, values=(0.001, 0.003, 0.01), of_task=False),
}


@dataclass(frozen=True, slots=True)
class Task:
    """A data set with its model, and how much is trained: examples of a batch, users of a round, and rounds.

    lr: a usual learning rate of SGD there.
    """

    load: Callable[[Path | None], Population]
    model: str
    batch_size: int
    cohort: int
    rounds: int
    lr: float


def _by_name(name: str) -> Callable[[Path | None], Population]:
    return lambda data: datasets.load(name, data)


def short_lines(data: Path | None) -> Population:
    """Shakespeare's roles with 12 windows or more: the first 40 characters of the first 12, (40,).

    Raises DatasetError when the folder or the file is missing.
    """
    roles = datasets.load("shakespeare", data)
    talkers = roles.subset(np.flatnonzero(roles.sizes >= WINDOWS).tolist())
    shards = [
        {name: array[:WINDOWS, :LENGTH] for name, array in talkers.shard(role).items()} for role in range(len(talkers))
    ]
    return Population.of(talkers.clients, shards, roles.classes)


def small_lstm() -> ModelSpec:
    """The next character by one LSTM layer of 64: a `char_lstm` that trains in minutes. D = 25,514."""
    return next_token("small_lstm", lambda: CharLstm(90, HIDDEN, layers=1), (LENGTH,), 90)


TASKS = {
    "wisdm": Task(_by_name("wisdm"), "mlp", 40, 5, 60, 0.3),
    "omniglot": Task(_by_name("omniglot"), "omniglot_cnn", 14, 5, 60, 0.1),
    "shakespeare": Task(short_lines, f"{__name__}:small_lstm", 6, 5, 40, 6.0),
    "digits": Task(_by_name("digits"), "logreg", 20, 5, 10, 0.3),
}
STUDIED = ("wisdm", "omniglot", "shakespeare")
"""The tasks of the study; quick ones take "digits", which needs no data."""


def compare(*, task: str, way: str, data: Path | None, rounds: int, seed: int) -> Series:
    """By tuned value: `accuracy VALUE` of unseen users ten times, and `loss VALUE`, the training loss near the end.

    A round is both trips of an algorithm that has two, with one cohort.
    """
    what, how = TASKS[task], WAYS[way]
    users = what.load(data).split(HELD_OUT, seed)
    every, trips = rounds // 10 * how.trips, rounds * how.trips
    series: Series = {}
    for rate in (value * what.lr if how.of_task else value for value in how.values):
        config = SimulationConfig(
            model=what.model,
            algorithm=how.algorithm,
            settings={"client_lr": what.lr, "batch_size": what.batch_size, **how.settings, how.tuned: rate},
            cohort=what.cohort,
            same_cohort=how.trips > 1,
            seed=seed,
        )
        measurements = measured(training_on(users, config), trips, every)
        series[f"accuracy {rate:g}"] = measurements["accuracy"]
        late = measurements["loss"][-every:]
        series[f"loss {rate:g}"] = [mean(late)]
    return series


def _find(trials: Trials) -> Findings:
    tasks = ("digits",) if trials.quick else STUDIED
    keys = [(task, way) for task in tasks for way in WAYS]
    cases = [{"task": task, "way": way, "data": trials.data, "rounds": TASKS[task].rounds} for task, way in keys]
    trained = dict(zip(keys, trials.run(compare, cases), strict=True))
    best = {key: least(series, "loss ") for key, series in trained.items()}
    accuracies: list[Row] = [[way, *(_accuracy(trained[task, way], best[task, way]) for task in tasks)] for way in WAYS]
    values: list[Row] = [[way, f"`{WAYS[way].tuned}`", *(best[task, way] for task in tasks)] for way in WAYS]
    return Findings(
        setup=" ".join(_in_words(task) for task in tasks)
        + " One sweep over a user's examples a round; a round of Mime is both of its trips, with one cohort. All "
        "means over users are uniform. Each algorithm has the value of the tuned setting with the least loss on "
        "training users in the last tenth of the rounds. Accuracies are of users who never train, the mean of the last "
        "three of ten measurements.",
        tables=[
            Table(title="Accuracy on unseen users", columns=["algorithm", *tasks], rows=accuracies),
            Table(title="Tuned values", columns=["algorithm", "setting", *tasks], rows=values),
            *(_by_value(task, trained) for task in tasks),
        ],
        plots=[_plot(task, {way: (trained[task, way], best[task, way]) for way in WAYS}) for task in tasks],
    )


def _by_value(task: str, trained: Mapping[tuple[str, str], list[Series]]) -> Table:
    """The accuracies of all values, tuned or not: on training users one may look best that is not on others."""
    rows: list[Row] = []
    for way in WAYS:
        of_way = trained[task, way]
        values = [name.removeprefix("accuracy ") for name in of_way[0] if name.startswith("accuracy ")]
        rows.append([way, ", ".join(values), *(_accuracy(of_way, value) for value in values)])
    columns = ["algorithm", "values", "smallest", "middle", "largest"]
    return Table(title=f"Accuracy on unseen users of {task} by value", columns=columns, rows=rows)


def _in_words(task: str) -> str:
    what = TASKS[task]
    return (
        f"`{task}` with `{what.model.rpartition(':')[2]}`: {what.rounds} rounds of {what.cohort} users, batches of "
        f"{what.batch_size}."
    )


def _accuracy(trained: Sequence[Series], value: str) -> PerSeed:
    return finals(trained, f"accuracy {value}")


def _plot(task: str, ways: Mapping[str, tuple[list[Series], str]]) -> Plot:
    every = TASKS[task].rounds // 10
    curves = {way: curve(trained, every, f"accuracy {value}") for way, (trained, value) in ways.items()}
    return Plot(title=f"Accuracy on unseen users of {task}", x="round", y="accuracy", curves=curves)


DRIFT_ON_USERS = Study(
    "drift-on-users",
    "Do corrections of client drift beat momentum and Adam on the server alone, on real users?",
    MIME,
    _find,
)
