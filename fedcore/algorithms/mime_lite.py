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
from fedcore.algorithms.base_optimizer import BaseOptimizer
from fedcore.algorithms.settings import choice, count, fraction, positive
from fedcore.algorithms.two_trips import full_gradient, mean_gradient
from fedcore.schedule import Loop, Weighting


@dataclass(frozen=True, slots=True)
class MimeLite:
    """Down: the model and s, 2d, or 3d with adam. Up: delta and gradient, 2d. Server state: what goes down.

    optimizer: the base optimizer, "momentum" (SGD with momentum), "adam" or "adagrad".
    client_lr: step size η of local steps; use about 0.001 to 0.01 with adam and adagrad.
    server_lr: step size on the mean delta; 1 in the paper.
    beta1, beta2, epsilon: β₁, β₂, ε of the base optimizer.
    initial_v: where v of adam and adagrad starts; above 0, because devices divide by √v before any gradient was seen.
    epochs, batch_size: local sweeps and batch size.
    weighting: the paper is "uniform"; "examples" weighs a device by its number of examples.
    """

    name: ClassVar[str] = "mimelite"
    family: ClassVar[str] = "mime"

    optimizer: Literal["momentum", "adam", "adagrad"] = choice("momentum", "adam", "adagrad")
    client_lr: float = positive(0.1)
    server_lr: float = positive(1.0)
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.99)
    epsilon: float = positive(1e-3)
    initial_v: float = positive(1e-4)
    epochs: int = count(1)
    batch_size: int = count(20)
    weighting: Weighting = choice("uniform", "examples")

    @property
    def passes(self) -> tuple[Pass, ...]:
        train = Pass("train", Loop(batch_size=self.batch_size, epochs=self.epochs), self._begin, self._step)
        return train, full_gradient(self.batch_size)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D} | self._optimizer.start(params_D)

    def broadcast(self, state: State) -> Broadcast:
        return dict(state)

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {
            "delta": carries["train"]["params"] - broadcast["params"],
            "gradient": mean_gradient(carries["sweep"]),
        }

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        moved = {"params": state["params"] + self.server_lr * step.lr_scale * mean["delta"]}
        return moved | self._optimizer.move(mean["gradient"], state)

    @property
    def _optimizer(self) -> BaseOptimizer:
        return BaseOptimizer(self.optimizer, self.beta1, self.beta2, self.epsilon, self.initial_v)

    def _begin(self, broadcast: Broadcast) -> Carry:
        return {"params": broadcast["params"]}

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(carry["params"])
        return {"params": carry["params"] - self.client_lr * self._optimizer.direction(gradient_D, broadcast)}
