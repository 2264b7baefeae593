"""Personal models: a shared body under users' own heads against one model for all, tuned for each user or not.

Collins et al. 2021, section 5. Every user trains, and measures the model that it would use on examples of its own which
nobody trained on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from export.model import Model
from export.models import load as load_model
from research import study
from simulator import datasets
from simulator.configuration import HELD_OUT, SimulationConfig
from simulator.engine import evaluate_own
from simulator.population import Population
from simulator.simulation import training_on
from simulator.training import FineTuning, fine_tuned

MODEL, HEAD, BATCH, COHORT = "mlp", "3.*", 20, 10
RATES = (0.03, 0.1, 0.3)
NORMAL = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to models for users. tried: the values of each setting that is tuned, beside the learning rate.

    algorithm: empty for users who train alone, from the same initial model.
    """

    algorithm: str
    tried: Mapping[str, Sequence[int]] = field(default_factory=dict)
    local: str = ""

    def choices(self) -> Iterator[dict[str, Any]]:
        """Every choice of the tuned settings."""
        for rate, *values in product(RATES, *self.tried.values()):
            yield {"client_lr": rate, **dict(zip(self.tried, values, strict=True))}


WAYS = {
    "FedRep": Way("fedrep", {"head_epochs": (5, 10), "epochs": (1, 5)}, HEAD),
    "FedPer": Way("fedper", {"epochs": (1, 5)}, HEAD),
    "FedAvg, fine-tuned": Way("fedavg", {"epochs": (1, 5), "fine_tune": (5, 20)}),
    "FedAvg": Way("fedavg", {"epochs": (1, 5)}),
    "alone": Way("", {"epochs": (20, 100)}),
}


def train_personal(
    *, way: str, chosen: Mapping[str, Any], task: Mapping[str, Any], validate: bool, seed: int
) -> study.Series:
    """`measured` of users on their own examples, and `users`, the accuracy of each at the end.

    chosen: the tuned settings. task: data, rounds, and how often users measure. validate: train and measure on the
    training examples alone, of which users hold a share out once more.
    """
    users, rounds = datasets.load(task["dataset"], task["data"], task["clients"]), task["rounds"]
    train, test = users.split_examples(HELD_OUT, seed)
    if validate:
        train, test = train.split_examples(HELD_OUT, seed + 1)
    how, settings = WAYS[way], {"batch_size": BATCH, **chosen}
    if not how.algorithm:
        return _alone(train, test, FineTuning(**settings), seed, rounds // task["every"])
    fine_tune = settings.pop("fine_tune", 0)
    config = SimulationConfig(
        model=MODEL,
        local=how.local,
        algorithm=how.algorithm,
        settings=settings | {"weighting": "uniform"},
        cohort=COHORT,
        own_examples=True,
        fine_tune=fine_tune,
        seed=seed,
    )
    training = training_on((train, test), config)
    series = study.measured(training, rounds, task["every"])
    diverged = series["accuracy"][-1] is None
    return series | {"users": [None] * len(test) if diverged else training.measure(rounds)["accuracy"].tolist()}


def _alone(train: Population, test: Population, tuning: FineTuning, seed: int, points: int) -> study.Series:
    """The same series of users who train without others: rounds change nothing."""
    model = Model(load_model(MODEL, train.shape, train.classes), seed)
    models = fine_tuned(model, model.initial, tuning, train, key=(seed, 1), device="cpu")
    accuracies = evaluate_own(model, models, test)["accuracy"].tolist()
    return {"user_mean": [statistics.fmean(accuracies)] * points, "users": accuracies}


def _find(trials: study.Trials) -> study.Findings:
    task: dict[str, Any] = {"dataset": "wisdm", "data": trials.data, "clients": None, "rounds": 60, "every": 6}
    if trials.quick:
        task = {"dataset": "digits", "data": None, "clients": 20, "rounds": 2, "every": 1}
    choices = {way: list(how.choices())[: 1 if trials.quick else None] for way, how in WAYS.items()}
    keys = [(way, chosen) for way in WAYS for chosen in choices[way]]
    cases = [{"task": task, "way": way, "chosen": chosen, "validate": True} for way, chosen in keys]
    validated = list(zip(keys, trials.run(train_personal, cases), strict=True))
    best = {way: _best([(chosen, runs) for (one, chosen), runs in validated if one == way]) for way in WAYS}
    cases = [{"task": task, "way": way, "chosen": chosen, "validate": False} for way, chosen in best.items()]
    trained = dict(zip(WAYS, trials.run(train_personal, cases), strict=True))
    plot = _plot(trained, task["every"])
    return study.Findings(setup=_setup(task["dataset"], task["rounds"]), tables=_tables(trained, best), plots=[plot])


def _best(tried: Sequence[tuple[dict[str, Any], Sequence[study.Series]]]) -> dict[str, Any]:
    """The choice whose users are most accurate at the end, on the examples for validation."""
    return max(tried, key=lambda pair: study.mean(study.last(pair[1], "user_mean")) or 0.0)[0]


def _setup(dataset: str, rounds: int) -> str:
    return (
        f"Data `{dataset}`, model `{MODEL}`, whose last layer, `{HEAD}`, is the head of FedRep and FedPer. {rounds} "
        f"rounds of {COHORT} users, batches of {BATCH}, uniform means. Every user trains, and holds a fifth of its "
        "examples out. All accuracies are of users on these, each with the model that it would use: its own, the "
        "shared one, or the shared one after sweeps over its own examples. Alone, a user trains from the same initial "
        "model without others. Each way has the settings with the best mean over users on a fifth of the training "
        "examples, which were held out for that and are trained on in the end."
    )


def _tables(trained: Mapping[str, Sequence[study.Series]], best: Mapping[str, Mapping[str, Any]]) -> list[study.Table]:
    accuracies: list[study.Row] = [
        [way, study.last(runs, "user_mean"), *(_of_users(runs, place) for place in (0.1, 0.5))]
        for way, runs in trained.items()
    ]
    gains: list[study.Row] = [_gain(way, trained[way], trained["FedAvg"]) for way in WAYS if way != "FedAvg"]
    tuned: list[study.Row] = [
        [way, ", ".join(f"`{name}` {value:g}" for name, value in best[way].items())] for way in WAYS
    ]
    gain_columns = ["way", "mean gain", "95 % interval over users", "users who gain", "users"]
    return [
        study.Table(
            title="Accuracy of users on their own held-out examples",
            columns=["way", "mean over users", "10th percentile", "median"],
            rows=accuracies,
        ),
        study.Table(
            title="Gain of users over FedAvg, for each the mean of its seeds", columns=gain_columns, rows=gains
        ),
        study.Table(title="Tuned settings", columns=["way", "settings"], rows=tuned),
    ]


def _of_users(runs: Sequence[study.Series], share: float) -> study.PerSeed:
    """A quantile over users, for each seed; None where training diverged."""
    return [_quantile([value for value in run["users"] if value is not None], share) for run in runs]


def _quantile(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[math.floor(share * len(values))] if values else None


def _gain(way: str, ours: Sequence[study.Series], theirs: Sequence[study.Series]) -> study.Row:
    """How much better users are than with the other way, paired by user."""
    pairs = [list(zip(one["users"], other["users"], strict=True)) for one, other in zip(ours, theirs, strict=True)]
    gains = [
        statistics.fmean(a - b for a, b in of_seeds if a is not None and b is not None)
        for of_seeds in zip(*pairs, strict=True)
    ]
    centre, half = statistics.fmean(gains), NORMAL * statistics.stdev(gains) / math.sqrt(len(gains))
    better = sum(gain > 0 for gain in gains)
    return [way, centre, f"{centre - half:.3f} to {centre + half:.3f}", str(better), str(len(gains))]


def _plot(trained: Mapping[str, Sequence[study.Series]], every: int) -> study.Plot:
    curves = {way: study.curve(runs, every, "user_mean") for way, runs in trained.items()}
    title = "Accuracy of users on their own held-out examples"
    return study.Plot(title=title, x="round", y="accuracy, mean over users", curves=curves)


PERSONAL_MODELS = study.Study(
    "personal-models",
    "Do a shared body and a head of one's own serve users better than one model for all?",
    study.COLLINS,
    _find,
)
