"""MimeLite: devices take steps of the server's optimizer, whose state only the server moves.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier for cross-device federated
learning", NeurIPS 2021, Algorithm 1 (MimeLite). The base optimizers are those of its Table 2, and Adagrad in the same
way.

With U the base optimizer's step and V the move of its state s:

    on the phone    y starts at the received x; for every batch   y −= client_lr · U(g(y), s)   s stays fixed
                    and one more sweep gathers                    c_i = ∇F_i(x)                 all local examples
    on the server   x += server_lr · mean(y_i − x), then once     s ← V(mean(c_i), s)

    momentum  s = m      U(g, s) = β₁ m + (1 − β₁) g                    V: m ← β₁ m + (1 − β₁) c
    adam      s = m, v   U(g, s) = (β₁ m + (1 − β₁) g) / (√v + ε)       V: m as above, v ← β₂ v + (1 − β₂) c²
    adagrad   s = v      U(g, s) = g / (√v + ε)                         V: v ← v + c²

Traps: s moves after the local work, once a round, from full-batch gradients taken at x, never from local ones. A
full-batch gradient is Σ(batch mean · batch size) / n, not a mean of batch means. v must start above 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import BaseOptimizer, full_gradient, mean_gradient
from fedcore.algorithms.settings import choice


@dataclass(frozen=True, slots=True)
class MimeLite(BaseOptimizer):
    """Down: the model and s, 2d, or 3d with adam. Up: delta and gradient, 2d. Server state: what goes down.

    optimizer: the base optimizer, "momentum" (SGD with momentum), "adam" or "adagrad".
    """

    name: ClassVar[str] = "mimelite"

    optimizer: Literal["momentum", "adam", "adagrad"] = choice("momentum", "adam", "adagrad")

    @property
    def passes(self) -> tuple[Pass, ...]:
        return Pass("train", self.loop, self._begin, self._step), full_gradient(self.batch_size)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D} | self.start(params_D)

    def broadcast(self, state: State) -> Broadcast:
        return dict(state)

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {
            "delta": carries["train"]["params"] - broadcast["params"],
            "gradient": mean_gradient(carries["sweep"]),
        }

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        moved = {"params": state["params"] + self.server_lr * step.lr_scale * mean["delta"]}
        return moved | self.move(mean["gradient"], state)

    def _begin(self, broadcast: Broadcast) -> Carry:
        return {"params": broadcast["params"]}

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(carry["params"])
        return {"params": carry["params"] - self.client_lr * self.direction(gradient_D, broadcast)}
