"""Mime: devices take variance-reduced steps of the server's optimizer, whose state only the server moves. Two trips.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier for cross-device federated
learning", NeurIPS 2021, Algorithm 1 (Mime). The base optimizers are those of its Table 2, and Adagrad in the same way.

With U the base optimizer's step and V the move of its state s:

    trip 1   on the phone    c_i = ∇F_i(x)                                               all local examples
             on the server   c ← mean(c_i)
    trip 2   on the phone    y starts at the received x; for every batch B
                             y −= client_lr · U(g(y; B) − g(x; B) + c, s)                s and c stay fixed
             on the server   x += server_lr · mean(y_i − x), then once   s ← V(c, s)

    sgd       s = –      U(g, s) = g
    momentum  s = m      U(g, s) = β₁ m + (1 − β₁) g                    V: m ← β₁ m + (1 − β₁) c
    adam      s = m, v   U(g, s) = (β₁ m + (1 − β₁) g) / (√v + ε)       V: m as above, v ← β₂ v + (1 − β₂) c²
    adagrad   s = v      U(g, s) = g / (√v + ε)                         V: v ← v + c²

The paper has one cohort for both trips, which `same_cohort` asks for. Else each trip has its own (`local_training.py`).

Traps: both gradients of a step are taken on the same batch. s moves once for two trips, after the local work, from c.
With "sgd", full batches and one cohort this is FedDane without its proximal term.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Report, ServerStep, State, Trip, Vector
from fedcore.algorithms.local_training import BaseOptimizer, begin_state, gather_gradient, reduced_gradient, train


@dataclass(frozen=True, slots=True)
class Mime(BaseOptimizer):
    """Down: d, then the model, c and s, 2d (sgd) to 4d (adam). Up: d, then d. Server state: what goes down in trip 2.

    optimizer: the base optimizer, "momentum" (SGD with momentum), "adam", "adagrad" or "sgd".
    epochs, batch_size: local sweeps and batch size of trip 2; the batch size of trip 1 changes nothing but round-off.
    """

    name: ClassVar[str] = "mime"

    @property
    def trips(self) -> tuple[Trip, Trip]:
        second = train(self.loop, self._step, self.server_lr)
        return gather_gradient(self.batch_size), replace(second, update=self._update)

    def init(self, params_D: Vector) -> State:
        return begin_state(params_D) | self.start(params_D)

    def _step(self, carry: Carry, received: Broadcast, grad: Gradient) -> Carry:
        u_D = self.direction(reduced_gradient(carry, received, grad), received)
        return {"params": carry["params"] - self.client_lr * u_D}

    def _update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        x_D = state["params"] + self.server_lr * step.lr_scale * mean["delta"]
        return state | {"params": x_D} | self.move(state["gradient"], state)
