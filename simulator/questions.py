"""A question to the clients of a simulation: one round of all of them, in the engine."""

from __future__ import annotations

import math
from typing import Protocol

from export.model import Model, ModelSpec
from fedcore.algorithms import name_of, settings_of
from fedcore.algorithms.algorithm import Algorithm
from fedcore.bundle import AlgorithmRef
from fedcore.questions.answer import Answer
from fedcore.questions.reading import answer_of
from simulator.cohorts import Cohorts
from simulator.configuration import PrivateTraining
from simulator.engine import Engine
from simulator.population import Population
from simulator.private_training import PrivateSums, SimulatedPrivacy, promise_of


class Asks(Protocol):
    """What is asked: a question of SQL or by name, or heavy hitters."""

    def spec(self) -> ModelSpec:
        """The model whose parameters are the answer."""

    def algorithm(self) -> Algorithm:
        """The algorithm that asks."""


def ask_population(
    asked: Asks,
    population: Population,
    *,
    seed: int = 0,
    rounds: int = 1,
    epsilon: float | None = None,
    delta: float | None = None,
) -> Answer:
    """What all clients answer, in every round. epsilon, delta: with noise for such a promise.

    Raises EngineError when the data lack a field, PrivacyError for a promise that cannot be, Diverged when no client
    has a finite answer.
    """
    model, algorithm, clients = Model(asked.spec()), asked.algorithm(), len(population)
    promise: SimulatedPrivacy | None = None
    if epsilon is not None:
        private = PrivateTraining(epsilon=epsilon, delta=1 / (10 * clients) if delta is None else delta)
        promise = promise_of(private, clients, Cohorts(clients), rounds)
    sums = None if promise is None else PrivateSums(promise, seed)
    engine = Engine(model, algorithm, population, seed=seed, private=sums)
    for number in range(1, rounds + 1):
        engine.run_round(number, range(clients))
    multiplier = 0.0 if promise is None else promise.noise_multiplier * math.sqrt(rounds)
    reference = AlgorithmRef(name_of(algorithm), settings_of(algorithm))
    return answer_of(reference, model.schema.unflatten(engine.state["params"]), multiplier)
