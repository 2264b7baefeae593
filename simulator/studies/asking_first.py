"""Asking first: what devices answer under a small budget, and what it is worth to a training that then begins.

Bian et al. 2024 ask devices for aggregates under a budget of a week. Here sizes, labels and the normaliser of inputs
are asked together under ε = 1, and decide input normalisation, batch size and goal. Sums grow with the number of
devices, and noise does not: so we ask the data set's own users, and crowds in which each device has the examples of a
user who was drawn with replacement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.normalising import Normaliser
from export.questions.builtin import BuiltIn, compile_built_in
from fedcore.plan import Field
from fedcore.privacy.accounting import calibrated, spent
from fedcore.privacy.settings import Noise
from fedcore.questions.answer import Answer
from simulator import datasets
from simulator.configuration import HELD_OUT, SimulationConfig
from simulator.datasets.wisdm import raw_wisdm
from simulator.population import Population
from simulator.questions import ask_population
from simulator.studies.papers import BIAN
from simulator.studies.study import Findings, Plot, Row, Study, Table, mean
from simulator.studies.trainings import curve, finals, measured, training_on
from simulator.studies.trials import Series, Trials

EPSILON, QUESTIONS = 1.0, 3
MOST_ROWS, LARGEST = 64, 256
"""Rows of a device that count, and the largest size."""
GOAL, BATCH, STEPS, RARE = 10, 32, 10, 0.05
"""Goal and batch size of one who knows nothing; the steps of a device that one who knows aims at, and the share of
rounds that may lack the rarest label."""
DEVICES_TRAINED, POINTS = 400, 10
RATES = (1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
WISDM_BOUNDS = ((0.0, 0.3),) * 30 + ((-15.0, 15.0),) * 3 + ((0.0, 5000.0),) * 3 + ((0.0, 15.0),) * 6 + ((0.0, 20.0),)
"""What is known of each feature without data: a window has 10 s and ten bins, and a phone some m/s²."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to begin. asked: who, in `CROWDS` by name, or nobody. bounds: whether these normalise what answers do not.
    settings: whether goal and batch size follow from the answers.
    """

    asked: str = ""
    bounds: bool = True
    settings: bool = False


EXACT = "the users, without noise"
CROWDS = {"the users": 0, "1,000 devices": 1_000, "10,000 devices": 10_000, EXACT: 0}
"""Who is asked, and how many devices they are; 0 for the training users themselves."""
WAYS = {
    "raw inputs": Way(bounds=False),
    "bounds only": Way(),
    **{name: Way(name, settings=True) for name in CROWDS},
    "10,000 devices, normaliser only": Way("10,000 devices"),
}


def users_of(dataset: str, data: Path | None) -> tuple[Population, NDArray[np.float64]]:
    """The users with raw features, and the bounds (E, 2) of each."""
    if dataset == "wisdm" and data is not None:
        return raw_wisdm(data), np.array(WISDM_BOUNDS)
    users = datasets.load(dataset, data, 40)
    fields = {"x": 255 * users.fields["x"].astype(np.float32), "y": users.fields["y"]}
    scaled = Population(users.clients, fields, users.starts, users.classes)
    return scaled, np.tile([0.0, 255.0], (math.prod(scaled.shape or ()), 1))


def crowd_of(users: Population, devices: int, seed: int) -> Population:
    """Devices that have the examples of a user each, drawn with replacement; 0: the users."""
    if not devices:
        return users
    chosen = np.random.Generator(np.random.Philox(key=[seed, devices])).integers(0, len(users), devices)
    rows = np.concatenate([np.arange(users.starts[user], users.starts[user + 1]) for user in chosen])
    names = tuple(f"device {number}" for number in range(devices))
    fields = {name: values[rows] for name, values in users.fields.items()}
    return Population(names, fields, np.concatenate([[0], np.cumsum(users.sizes[chosen])]), users.classes)


def asked(*, seed: int, dataset: str, data: Path | None, devices: int, private: bool) -> Series:
    """What devices say, under ε = 1 in all if private: `mean` and `deviation` of each element and whether its figures
    exceed their errors (`trusted`), `labels`, the share of each, `size`, the mean number of examples, and `goal` and
    `batch`, which follow.
    """
    users, bounds = users_of(dataset, data)
    train, _ = users.split(HELD_OUT, seed)
    crowd, delta = crowd_of(train, devices, seed), 1 / (10 * (devices or len(train)))
    fields = [Field("x", "float32", train.shape or ()), Field("y", "int64", (), train.classes)]
    low, high = (tuple(bounds[:, end].tolist()) for end in (0, 1))
    questions = (
        BuiltIn("sizes", high=(LARGEST,)),
        BuiltIn("labels", ("y",), most_rows=MOST_ROWS),
        BuiltIn("normaliser", ("x",), low=low, high=high, most_rows=MOST_ROWS),
    )
    sizes, labels, elements = (
        ask_population(
            compile_built_in(question, fields, minimum_devices=20 if devices else 1, private=private),
            crowd,
            seed=QUESTIONS * seed + number,
            epsilon=_each(delta) if private else None,
            delta=delta,
        )
        for number, question in enumerate(questions)
    )
    size = _number(sizes.rows[0][4]) if sizes.rows else float(BATCH * STEPS)
    counts, having = np.zeros((2, train.classes or 1))
    for row in labels.rows:
        counts[int(_number(row[0]))], having[int(_number(row[0]))] = _number(row[1]), _number(row[2])
    # One round lacks the rarest label with the chance (1 − having)^goal.
    rarest = min(max(having.min() / len(crowd), 0.01), 0.99)
    return {
        **_normaliser(elements, bounds),
        "labels": (counts / max(counts.sum(), 1.0)).tolist(),
        "size": [size],
        "goal": [float(min(math.ceil(math.log(RARE) / math.log(1 - rarest)), len(train)))],
        "batch": [2.0 ** round(math.log2(max(size, STEPS) / STEPS))],
    }


def _each(delta: float) -> float:
    """The ε of each question, whose Gaussian mechanisms spend ε = 1 together."""
    return spent([Noise(noise_multiplier=calibrated(Noise(noise_multiplier=1.0), QUESTIONS, EPSILON, delta))], delta)


def _normaliser(answer: Answer, bounds: NDArray[np.float64]) -> Series:
    """Mean and deviation of each element, where its deviation exceeds its error; else what the bounds say."""
    mean, deviation = bounds.mean(1), (bounds[:, 1] - bounds[:, 0]) / 2
    trusted = np.zeros(len(bounds))
    for place, row in enumerate(answer.rows):
        element, error = int(_number(row[1])), 0.0 if answer.errors is None else answer.errors[place][3] or 0.0
        if row[3] is not None and _number(row[3]) > error:
            mean[element], deviation[element], trusted[element] = _number(row[2]), _number(row[3]), 1
    return {"mean": mean.tolist(), "deviation": deviation.tolist(), "trusted": trusted.tolist()}


def _number(value: Any) -> float:
    return float(value)


def trained(*, seed: int, task: Mapping[str, Any], way: str, rate: float, known: Mapping[str, Any] | None) -> Series:
    """The series of a training that begins in this way. task: the data, and how many devices all rounds train.

    known: by seed, what was asked.
    """
    how = WAYS[way]
    users, bounds = users_of(task["dataset"], task["data"])
    mean, deviation = bounds.mean(1).tolist(), ((bounds[:, 1] - bounds[:, 0]) / 2).tolist()
    goal, batch = GOAL, BATCH
    if known is not None:
        said = known[str(seed)]
        mean, deviation = said["mean"], said["deviation"]
        goal, batch = (int(said["goal"][0]), int(said["batch"][0])) if how.settings else (goal, batch)
    rounds = math.ceil(task["devices"] / goal / POINTS) * POINTS
    config = SimulationConfig(
        model="mlp",
        dataset=task["dataset"],
        data=task["data"],
        settings={"client_lr": rate, "batch_size": batch, "weighting": "uniform"},
        rounds=rounds,
        cohort=goal,
        seed=seed,
    )
    normaliser = Normaliser("x", tuple(mean), tuple(deviation)) if how.bounds else None
    return measured(training_on(users.split(HELD_OUT, seed), config, normaliser=normaliser), rounds, rounds // POINTS)


def _find(trials: Trials) -> Findings:
    dataset, rates = ("digits", (0.1,)) if trials.quick else ("wisdm", RATES)
    crowds = {name: CROWDS[name] for name in (("1,000 devices", EXACT) if trials.quick else CROWDS)}
    ways = [way for way, how in WAYS.items() if not how.asked or how.asked in crowds]
    devices, common = 40 if trials.quick else DEVICES_TRAINED, {"dataset": dataset, "data": trials.data}
    cases: list[dict[str, Any]] = [
        common | {"devices": crowd, "private": name != EXACT} for name, crowd in crowds.items()
    ]
    answers = dict(zip(crowds, trials.run(asked, cases), strict=True))
    by_seed = {
        name: {str(seed): run for seed, run in zip(trials.seeds, runs, strict=True)} for name, runs in answers.items()
    }
    keys = [(way, rate) for way in ways for rate in rates]
    task = common | {"devices": devices}
    cases = [{"task": task, "way": way, "rate": rate, "known": by_seed.get(WAYS[way].asked)} for way, rate in keys]
    runs = dict(zip(keys, trials.run(trained, cases), strict=True))
    best = {way: max(rates, key=lambda rate, way=way: mean(finals(runs[way, rate])) or 0.0) for way in ways}
    curves = {way: curve(runs[way, best[way]], devices // POINTS) for way in ways}
    return Findings(
        setup=_setup(dataset, devices),
        tables=[_answers(answers), _trainings(best, {way: runs[way, best[way]] for way in ways})],
        plots=[Plot(title="Accuracy on unseen users", x="devices trained", y="accuracy", curves=curves)],
    )


def _setup(dataset: str, devices: int) -> str:
    return (
        f"Data `{dataset}` with inputs as they are on phones, model `mlp`, `fedavg` with uniform means; a training of "
        f"some {devices} devices in all rounds together, each way with its best of the learning rates "
        f"{', '.join(f'{rate:g}' for rate in RATES)}. Sizes, labels and the normaliser of 43 features, of {MOST_ROWS} "
        f"examples of a device at most and with bounds that need no data, are asked under ε = {EPSILON:g} in all at "
        f"δ = 1 / (10 devices). A device of a crowd has the examples of a training user, who is drawn with "
        f"replacement. Features whose deviation is within its stated error are normalised by their bounds. Those who "
        f"asked take {STEPS} steps or so on a device, and as many devices as a round needs to lack the rarest label "
        f"with a chance of {RARE:g} at most; the others goal {GOAL} and batches of {BATCH}."
    )


def _answers(answers: Mapping[str, Sequence[Series]]) -> Table:
    """The distance of answers from those without noise, by seed."""
    rows: list[Row] = []
    for name, runs in answers.items():
        apart = [_apart(*pair) for pair in zip(runs, answers[EXACT], strict=True)]
        rows.append([name, *(list(column) for column in zip(*apart, strict=True))])
    columns = ["asked", "features with figures", "error of means, in deviations", "error of deviations"]
    columns += ["largest error of a label's share", "error of the mean size", "goal", "batch size"]
    return Table(title="Answers under ε = 1, against those without noise", columns=columns, rows=rows)


def _apart(run: Series, exact: Series) -> tuple[float | None, ...]:
    """The numbers of a row of `_answers` for a seed."""
    found, truth = ({name: np.array(values, float) for name, values in one.items()} for one in (run, exact))
    kept = (found["trusted"] * truth["trusted"]) > 0
    of_means = (found["mean"] - truth["mean"])[kept] / truth["deviation"][kept]
    of_deviations = np.abs(found["deviation"] / truth["deviation"] - 1)[kept]
    return (
        float(kept.sum() / truth["trusted"].sum()),
        float(np.sqrt(np.mean(of_means**2))) if kept.any() else None,
        float(np.mean(of_deviations)) if kept.any() else None,
        float(np.abs(found["labels"] - truth["labels"]).max()),
        float(abs(found["size"][0] / truth["size"][0] - 1)),
        float(found["goal"][0]),
        float(found["batch"][0]),
    )


def _trainings(best: Mapping[str, float], runs: Mapping[str, Sequence[Series]]) -> Table:
    rows: list[Row] = [
        [way, f"{best[way]:g}", [run["accuracy"][0] for run in runs[way]], finals(runs[way])] for way in best
    ]
    columns = ["begins with", "best `client_lr`", "accuracy after a tenth", "final accuracy"]
    return Table(title="Accuracy on unseen users", columns=columns, rows=rows)


ASKING_FIRST = Study("asking-first", "What is it worth to ask devices before they train?", BIAN, _find)
