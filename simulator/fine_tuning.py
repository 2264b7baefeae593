"""Fine-tuning in the simulator: every user goes on from one model on examples of their own, and keeps what it reaches.

It is what a model that everybody shares can be for a user, so algorithms that give users models are compared with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from export.model import Model
from fedcore.algorithms import settings_of
from fedcore.algorithms.algorithm import Algorithm, Broadcast, Carry, ClientState, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalSgd
from fedcore.params import Float32
from fedcore.report import Weighting
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.errors import Diverged, EngineError
from simulator.population import Population

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
