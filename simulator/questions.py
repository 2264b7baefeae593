"""A question to the clients of a simulation: one round of all of them, in the engine."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from export.model import Model, ModelSpec
from fedcore.algorithms.algorithm import Algorithm
from fedcore.params import Float32
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


class Found(NamedTuple):
    """The model that is the answer, by its tensors, and the noise in each sum over the clip; 0 without noise."""

    tensors: dict[str, Float32]
    noise_multiplier: float


def ask_population(
    asked: Asks,
    population: Population,
    *,
    seed: int = 0,
    rounds: int = 1,
    epsilon: float = 0.0,
    delta: float = 0.0,
) -> Found:
    """What all clients answer, in every round. epsilon, delta: with noise for such a promise; 0 is without.

    Raises EngineError when the data lack a field, PrivacyError for a promise that cannot be, Diverged when no client
    has a finite answer.
    """
    model, clients = Model(asked.spec()), len(population)
    promise: SimulatedPrivacy | None = None
    if epsilon:
        private = PrivateTraining(epsilon=epsilon, delta=delta)
        promise = promise_of(private, clients, Cohorts(clients), rounds)
    sums = None if promise is None else PrivateSums(promise, seed)
    engine = Engine(model, asked.algorithm(), population, seed=seed, private=sums)
    for number in range(1, rounds + 1):
        engine.run_round(number, range(clients))
    tensors = {name: one.numpy() for name, one in model.tensors(torch.from_numpy(engine.state["params"])).items()}
    return Found(tensors, 0.0 if promise is None else promise.noise_multiplier * math.sqrt(rounds))
