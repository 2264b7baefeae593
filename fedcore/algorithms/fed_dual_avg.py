"""FedDualAvg: averaging in the dual space, for a loss with an l1 term whose models stay sparse.

Yuan, Zaheer, Reddi, "Federated composite optimization", ICML 2021. It minimises F(x) + l1 · ‖x‖₁.

    prox(z, s)      sign(z) · max(|z| − s · l1, 0)      soft threshold: small weights are exactly 0
    on the phone    z_i starts at the received dual z; for every batch k = 0 … K − 1
                    z_i −= client_lr · g(prox(z_i, s + client_lr · k))
    on the server   z += server_lr · mean(z_i − z),   s += server_lr · client_lr · K,   x = prox(z, s)

s is the sum of all step sizes so far: server_lr · client_lr · K · r before round r, from 0.
With l1 = 0 the dual is the model, and this is FedAvg. Traps: averaging models would fill their zeros, and so duals are
averaged. s grows by the same K on every device: each takes `steps` steps, however many examples it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.settings import choice, count, nonnegative, positive
from fedcore.schedule import Loop, Weighting


@dataclass(frozen=True, slots=True)
class FedDualAvg:
    """Down: the model, its dual and s, 2d + 1. Up: d. Server state: what goes down.

    The paper sends only the dual, of which x follows. A checkpoint here always holds the model: people read it.

    l1: weight of the l1 term.
    client_lr, server_lr: η_c and η_s of the paper.
    steps: local steps K of every device.
    batch_size: batch size of local steps.
    weighting: the paper is "uniform"; "examples" weighs a device by its number of examples.
    """

    name: ClassVar[str] = "feddualavg"
    family: ClassVar[str] = "dual averaging"

    l1: float = nonnegative(1e-4)
    client_lr: float = positive(0.1)
    server_lr: float = positive(1.0)
    steps: int = count(10)
    batch_size: int = count(20)
    weighting: Weighting = choice("uniform", "examples")

    @property
    def passes(self) -> tuple[Pass, ...]:
        # As many epochs as steps, because an epoch has at least one.
        loop = Loop(batch_size=self.batch_size, epochs=self.steps, steps=self.steps)
        return (Pass("train", loop, self._begin, self._step),)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D, "dual": params_D, "s": 0.0 * params_D[..., :1]}

    def broadcast(self, state: State) -> Broadcast:
        return dict(state)

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {"delta": carries["train"]["dual"] - broadcast["dual"]}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        server_lr = self.server_lr * step.lr_scale
        dual_D, s = state["dual"] + server_lr * mean["delta"], state["s"] + server_lr * self.client_lr * self.steps
        return {"params": self._prox(dual_D, s), "dual": dual_D, "s": s}

    def _begin(self, broadcast: Broadcast) -> Carry:
        return {"dual": broadcast["dual"], "s": broadcast["s"]}

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(self._prox(carry["dual"], carry["s"]))
        return {"dual": carry["dual"] - self.client_lr * gradient_D, "s": carry["s"] + self.client_lr}

    def _prox(self, dual_D: Vector, s: Vector) -> Vector:
        """The soft threshold, as the difference of the two parts beyond it: exact, and without a comparison."""
        above_D, below_D = dual_D - self.l1 * s, -dual_D - self.l1 * s
        return (above_D + abs(above_D)) / 2.0 - (below_D + abs(below_D)) / 2.0
