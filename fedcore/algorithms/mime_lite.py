"""MimeLite: devices take steps of the server's optimizer, whose state only the server moves.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier for cross-device federated
learning", NeurIPS 2021, Algorithm 1 (MimeLite) with the base optimizers of its Table 2.

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
from typing import TYPE_CHECKING, ClassVar, Literal

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.full_gradient import full_gradient, mean_gradient
from fedcore.algorithms.settings import choice, count, fraction, positive
from fedcore.loop import Loop

if TYPE_CHECKING:
    from fedcore.report import Weighting  # loads NumPy, which names and settings do not need


@dataclass(frozen=True, slots=True)
class MimeLite:
    """Down: the model and s, 2d, or 3d with adam. Up: delta and gradient, 2d. Server state: what goes down.

    optimizer: the base optimizer, "momentum" (SGD with momentum), "adam" or "adagrad".
    client_lr: step size η of local steps; use about 0.001 to 0.01 with adam and adagrad.
    server_lr: step size on the mean delta; 1 in the paper.
    beta1, beta2, epsilon: β₁, β₂, ε above.
    initial_v: where v starts; above 0, because devices divide by √v before any gradient was seen.
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
        train = Loop(batch_size=self.batch_size, epochs=self.epochs)
        return Pass("train", train, self._begin, self._step), full_gradient(self.batch_size)

    def init(self, params_D: Vector) -> State:
        zeros_D = 0.0 * params_D
        m, v = {"m": zeros_D}, {"v": zeros_D + self.initial_v}
        return {"params": params_D} | {"momentum": m, "adam": m | v, "adagrad": v}[self.optimizer]

    def broadcast(self, state: State) -> Broadcast:
        return dict(state)

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {
            "delta": carries["train"]["params"] - broadcast["params"],
            "gradient": mean_gradient(carries["sweep"]),
        }

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        moved = {"params": state["params"] + self.server_lr * step.lr_scale * mean["delta"]}
        return moved | self._move(mean["gradient"], state)

    def _begin(self, broadcast: Broadcast) -> Carry:
        return {"params": broadcast["params"]}

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(carry["params"])
        return {"params": carry["params"] - self.client_lr * self._direction(gradient_D, broadcast)}

    def _direction(self, gradient_D: Vector, s: Broadcast) -> Vector:
        """U: the base optimizer's step with its state held fixed."""
        u_D = self.beta1 * s["m"] + (1 - self.beta1) * gradient_D if "m" in s else gradient_D
        return u_D / (s["v"] ** 0.5 + self.epsilon) if "v" in s else u_D

    def _move(self, gradient_D: Vector, s: State) -> State:
        """V: the base optimizer's state after one gradient."""
        moved = {}
        if "m" in s:
            moved["m"] = self.beta1 * s["m"] + (1 - self.beta1) * gradient_D
        if self.optimizer == "adam":
            moved["v"] = self.beta2 * s["v"] + (1 - self.beta2) * gradient_D**2
        if self.optimizer == "adagrad":
            moved["v"] = s["v"] + gradient_D**2
        return moved
