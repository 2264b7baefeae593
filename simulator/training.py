"""Training, round by round, as `muster simulate` drives it; fine-tuning for every user, and local-only training."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.progress import START
from coordinator.rules.task_settings import MOST_LOSS_GROWTH
from export.model import Model
from fedcore.algorithms import settings_of
from fedcore.algorithms.algorithm import Algorithm, Broadcast, Carry, ClientState, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalSgd
from fedcore.params import Float32
from fedcore.plan import prefixed, unprefixed
from fedcore.schedule import Weighting
from fedcore.validation import decoder
from simulator.engine import Engine, evaluate, evaluate_own
from simulator.engines.computing import Computing, EngineName
from simulator.engines.memory import DIVERGED, cause
from simulator.engines.processes import compute_apart
from simulator.errors import Diverged, EngineError
from simulator.population import Population
from simulator.private_training import Cohorts, SimulatedPrivacy

# Fine-tuning in the simulator: every user goes on from one model on examples of their own, and keeps what it reaches.
#
# It is what a model that everybody shares can be for a user, so algorithms that give users models are compared with it.

TUNED = "tuned"


@dataclass(frozen=True, slots=True)
class FineTuning(LocalSgd):
    """Local SGD from the received model. Client state: the model that it reaches. The server learns nothing."""

    name: ClassVar[str] = "fine-tuning"
    family: ClassVar[str] = "personalised"
    weighting: ClassVar[Weighting] = "uniform"

    @classmethod
    def of(cls, algorithm: Algorithm, epochs: int) -> FineTuning:
        """So many sweeps with the steps and batches of an algorithm. Raises EngineError where it has none."""
        settings = settings_of(algorithm)
        if not {"client_lr", "batch_size"} <= settings.keys():
            raise EngineError(
                f"fine_tune takes client_lr and batch_size of the algorithm, and {algorithm.name} has not both: leave "
                "it out, or take fedavg"
            )
        return cls(client_lr=settings["client_lr"], batch_size=settings["batch_size"], epochs=epochs)

    def init_client(self, params_D: Vector) -> ClientState:
        """The model of the start."""
        return {TUNED: params_D}

    def keep(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> ClientState:
        """The trained model."""
        return {TUNED: carries["train"]["params"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        """A zero, as a report must have something."""
        return {"nothing": 0.0 * carries["train"]["params"][..., :1]}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        """The same state."""
        return dict(state)


def fine_tuned(
    model: Model, params: Float32, tuning: FineTuning, users: Population, *, key: tuple[int, int], device: str
) -> Float32:
    """The model of every user (users, D) after fine-tuning on all their examples. key: seed and round, of the orders.

    Raises Diverged when one of them is not finite.
    """
    start = copy.copy(model)
    start.initial = params
    seed, number = key
    engine = Engine(start, tuning, users, seed=seed, computing=Computing(device))
    lost = engine.run_round(number, range(len(users))).excluded
    if lost:
        raise Diverged(f"round {number}: the fine-tuned models of {lost} users are not finite; a lower client_lr helps")
    return engine.client_states[TUNED]


PerUser = dict[str, NDArray[np.float64]]
"""Mean loss, and accuracy if the model has it, of every user that measures: (users,)."""


Vectors = dict[str, NDArray[np.floating]]
"""Everything that the rounds of a training change, by name: arrays of any shape, float32 or float64."""

Tensors = dict[str, Float32]
"""A model as named tensors."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a training that are part of a result.

    cohort: clients that train in a round, in the first round if the cohort grows. train_users: clients that hold the
    training examples. parameters: numbers in a model. engine, engine_reason: "torch" or "graphs", and why; None if no
    engine trains. privacy: the basis for computing ε of its rounds; None if they are not private.
    """

    algorithm: str
    settings: dict[str, object]
    cohort: int
    train_users: int
    parameters: int
    engine: EngineName | None = None
    engine_reason: str | None = None
    privacy: SimulatedPrivacy | None = None


SERVER, CLIENTS = "server", "clients"

_MEASURED = decoder(dict[str, bytes])


class Training(Protocol):
    """A training that goes on round by round, and the users who measure it."""

    @property
    def facts(self) -> Facts:
        """The facts for its result."""

    @property
    def test(self) -> Population:
        """Examples of the users who measure, which no one trains on."""

    def run_round(self, number: int) -> dict[str, float]:
        """Train for a round, from 1. Returns its metrics, `<pass>.loss` first. Raises SimulatorError.

        `examples` is the number of examples that its clients hold.
        """

    def measure(self, number: int) -> PerUser:
        """The users' means after round `number`. Raises Diverged when a loss is not finite."""

    def vectors(self) -> Vectors:
        """A copy of everything that rounds change."""

    def restore(self, vectors: Mapping[str, NDArray[np.floating]]) -> None:
        """Continue from what `vectors` returned for the same training. Raises EngineError when they do not fit."""

    def tensors(self) -> Tensors:
        """The model as named tensors; empty if every user has its own model, or if it is linear."""

    def digest(self) -> str:
        """SHA-256 of everything that was trained."""


class EngineTraining:
    """Rounds of an engine, each with a cohort that is drawn from its population.

    test: the users who measure. cohorts: with the schedule of the server learning rate. reason: for the engine.
    fine_tuning: of the model that a user measures. With it, and where users have models of their own, those who measure
    are those who train, in the same order.
    """

    def __init__(
        self, engine: Engine, test: Population, cohorts: Cohorts, reason: str, fine_tuning: FineTuning | None = None
    ) -> None:
        self._engine, self.test, self._cohorts, self._fine_tuning = engine, test, cohorts, fine_tuning
        self._model, self._train = engine.model, engine.population
        self.facts = engine_facts(engine, cohorts.first, len(self._train), reason)

    def run_round(self, number: int) -> dict[str, float]:
        """One round."""
        members = self._cohorts.draw(number, self._train, self._engine.seed)
        schedule, size = self._cohorts.schedule, self._cohorts.size(number)
        start = self._start(members[0]) if number == 1 and len(members) else {}
        result = self._engine.run_round(number, members, schedule=schedule, expected=size)
        examples = int(self._train.sizes[members].sum())
        epsilon = {} if self._engine.private is None else {"epsilon": self._engine.private.privacy.spent(number)}
        return result.metrics | {"excluded": result.excluded, "examples": examples} | epsilon | start

    def _start(self, client: int) -> dict[str, float]:
        """The loss of one client's examples before any training, against which one that explodes shows."""
        params, one = self._engine.state["params"], self._train.subset([client])
        return {START: float(evaluate(self._model, params, one, device=self._engine.computing.home)["loss"][0])}

    def measure(self, number: int) -> PerUser:
        """The means of the users who measure, after round `number`."""
        per_user = self._measured(number)
        bad = np.flatnonzero(~np.isfinite(per_user["loss"])).tolist()
        if bad:
            why = cause(self._model, self._engine.state["params"], self.test, bad, number)
            raise Diverged(f"round {number}: the loss of {len(bad)} held-out users is not finite: {why}")
        return per_user

    def _measured(self, number: int) -> PerUser:
        measure = functools.partial(self._measure_here, number)
        if self._engine.computing.home == self._engine.computing.device:
            return measure()
        # On a GPU, and in a process that does not compute there itself, as it could fork none that does.
        values = compute_apart(lambda: {name: value.tobytes() for name, value in measure().items()}, _MEASURED)
        return {name: np.frombuffer(value) for name, value in values.items()}

    def _measure_here(self, number: int) -> PerUser:
        model, params, device = self._model, self._engine.state["params"], self._engine.computing.device
        own: Iterable[Float32] | None = self._engine.own_models
        if self._fine_tuning is not None:
            key = self._engine.seed, number
            own = fine_tuned(model, params, self._fine_tuning, self._train, key=key, device=device)
        if own is None:
            return evaluate(model, params, self.test, device=device)
        return evaluate_own(model, own, self.test, device=device)

    def vectors(self) -> Vectors:
        """A copy of the server state, and of the clients' states."""
        return {**prefixed(SERVER, self._engine.state), **prefixed(CLIENTS, self._engine.client_states)}

    def restore(self, vectors: Mapping[str, NDArray[np.floating]]) -> None:
        """Continue from what `vectors` returned."""
        check_shapes(vectors, self.vectors())
        self._engine.restore(unprefixed(SERVER, vectors), unprefixed(CLIENTS, vectors))

    def tensors(self) -> Tensors:
        """The model as named tensors."""
        return self._model.schema.unflatten(self._engine.state["params"])

    def digest(self) -> str:
        """SHA-256 of the trained weights."""
        return digest_of([self._engine.state["params"]])


def check_shapes(vectors: Mapping[str, NDArray[np.floating]], expected: Vectors) -> None:
    """Raise EngineError unless the vectors are named, shaped and typed as expected."""
    kinds, expected_kinds = (
        {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()} for arrays in (vectors, expected)
    )
    if kinds != expected_kinds:
        raise EngineError(f"the vectors are {kinds}, and this training moves {expected_kinds}")


def engine_facts(engine: Engine, cohort: int, train_users: int, reason: str) -> Facts:
    """The facts of a training in an engine. reason: for it."""
    return Facts(
        engine.algorithm.name,
        settings_of(engine.algorithm),
        cohort,
        train_users,
        engine.model.schema.size,
        engine.computing.engine,
        reason,
        None if engine.private is None else engine.private.privacy,
    )


def digest_of(arrays: Sequence[NDArray[np.floating]]) -> str:
    """SHA-256 of arrays, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


Point = dict[str, int | float]
"""A round: its number `round`, its metrics, and the measurements of held-out users after it, if any (`measured`)."""

Ending = Literal["rounds", "target_accuracy", "patience"]
"""The reason for the end: all rounds ran, the target accuracy was reached, or the loss stopped falling."""

PERCENTILES = (5, 25, 50, 75, 95)
LOSS, ACCURACY, USER_MEAN, PER_USER = "test.loss", "test.accuracy", "test.user_mean", "test.user_p"
_WATCHED = ("train.loss", LOSS)


def measured(per_user: PerUser, test: Population) -> Point:
    """The measurements of held-out users, as a part of a point.

    `test.loss` and `test.accuracy` are means over examples. `test.user_mean` is the mean over users of their accuracy,
    `test.user_p5` to `test.user_p95` its percentiles; of their loss, where the model has no accuracy.
    """
    point: Point = {f"test.{name}": overall(values, test) for name, values in per_user.items()}
    ranked = per_user.get("accuracy", per_user["loss"])
    point[USER_MEAN] = float(ranked.mean())
    return point | {f"{PER_USER}{percent}": float(np.percentile(ranked, percent)) for percent in PERCENTILES}


def overall(per_user: NDArray[np.float64], population: Population) -> float:
    """The per-example mean of a per-user mean."""
    return float(np.average(per_user, weights=population.sizes))


def noting() -> Callable[[Point], str]:
    """What says of each point in order its training loss, and what held-out users measured last."""
    last: dict[str, str] = {}

    def note(point: Point) -> str:
        loss = next(value for name, value in point.items() if name.endswith(".loss"))
        for name, words in ((LOSS, "held-out loss"), (ACCURACY, "accuracy")):
            if name in point:
                last[name] = f"{words} {point[name]:.3f}"
        return ", ".join([f"train loss {loss:.3f}", *last.values()])

    return note


@dataclass(frozen=True, slots=True)
class Limits:
    """The conditions for the end of a simulation.

    rounds: the most rounds. target_accuracy: the held-out accuracy at which it ends. patience: it ends this many rounds
    after the lowest held-out loss. Both are checked whenever the users measure.
    """

    rounds: int
    target_accuracy: float | None
    patience: int | None

    def ending(self, course: Sequence[Point]) -> Ending | None:
        """The reason to end the simulation after these rounds, or None if it continues."""
        if course and LOSS in course[-1]:
            last = course[-1]
            if self.target_accuracy is not None and last[ACCURACY] >= self.target_accuracy:
                return "target_accuracy"
            if self.patience is not None:
                best = min((point for point in course if LOSS in point), key=lambda point: point[LOSS])
                if last["round"] - best["round"] >= self.patience:
                    return "patience"
        return "rounds" if len(course) >= self.rounds else None


class Watch:
    """A look-out for a loss that explodes. words: how one did first; None until then.

    It is held against the loss before training, or against its first value where that is not known.
    """

    def __init__(self, course: Iterable[Point] = ()) -> None:
        self.words: str | None = None
        self._first: dict[str, float] = {}
        for point in course:
            self.look(point)

    def look(self, point: Point) -> bool:
        """Whether a loss of this point, the next one, is the first that explodes."""
        if START in point:
            self._first[START] = point[START]
        for name in (name for name in _WATCHED if name in point and self.words is None):
            value, first = point[name], self._first.setdefault(name, self._first.get(START, point[name]))
            if not math.isfinite(value) or value > MOST_LOSS_GROWTH * abs(first) > 0:
                self.words = f"round {point['round']}: {name} is {value:.4g}, and was {first:.4g} at first: {DIVERGED}"
                return True
        return False


# Local-only training: every user trains a model of their own on their own examples, and nothing is ever shared.


class LocalOnly:
    """One model for each user, trained by an algorithm whose whole population is that user.

    Every user holds some of their own examples out, and measures their own model on them.
    """

    def __init__(
        self, model: Model, algorithm: Algorithm, users: Population, *, held_out: float, seed: int, device: str
    ) -> None:
        train, self.test = users.split_examples(held_out, seed)
        self._model, self._device = model, device
        self._engines = [
            Engine(model, algorithm, train.subset([user]), seed=seed, computing=Computing(device))
            for user in range(len(train))
        ]
        self._examples = int(train.starts[-1])
        self.facts = engine_facts(self._engines[0], len(train), len(train), "every user has an engine of their own")

    def run_round(self, number: int) -> dict[str, float]:
        """A round of every user; the metrics are means over users."""
        results = [engine.run_round(number, [0], [user]).metrics for user, engine in enumerate(self._engines)]
        means = {name: float(np.mean([metrics[name] for metrics in results])) for name in results[0]}
        return means | {"examples": self._examples}

    def measure(self, number: int) -> PerUser:
        models = (engine.state["params"] for engine in self._engines)
        per_user = evaluate_own(self._model, models, self.test, device=self._device)
        bad = np.flatnonzero(~np.isfinite(per_user["loss"])).tolist()
        if bad:
            raise Diverged(f"round {number}: the models of users {bad} have no finite loss; a lower client_lr may help")
        return per_user

    def vectors(self) -> Vectors:
        """A copy of every user's server state, (users, …), and of what they keep as a client."""
        return {
            **_stacked(SERVER, [engine.state for engine in self._engines]),
            **_stacked(CLIENTS, [engine.client_states for engine in self._engines]),
        }

    def restore(self, vectors: Mapping[str, NDArray[np.floating]]) -> None:
        check_shapes(vectors, self.vectors())
        for user, engine in enumerate(self._engines):
            own = {name: array[user] for name, array in vectors.items()}
            engine.restore(unprefixed(SERVER, own), unprefixed(CLIENTS, own))

    def tensors(self) -> Tensors:
        """None: every user has a model."""
        return {}

    def digest(self) -> str:
        return digest_of([engine.state["params"] for engine in self._engines])


def _stacked(prefix: str, states: Sequence[Mapping[str, NDArray[np.float32]]]) -> Vectors:
    return {**prefixed(prefix, {name: np.stack([state[name] for state in states]) for name in states[0]})}
