"""Local AdaAlter: local steps of AdaGrad whose denominators the server averages with the models.

Xie, Koyejo, Gupta, Lin, "Local AdaAlter: communication-efficient stochastic gradient descent with adaptive learning
rates", 2019, arXiv:1911.09030, Algorithm 4.

With B² the averaged accumulator, which devices receive and hold fixed:

    on the device   y starts at the received x, A² at B²; for the t-th batch, t = 1, 2, …
                    y −= client_lr · g(y) / √(B² + t · epsilon²)
                    A² += g(y)²
    on the server   x = mean(y),  B² = mean(A²)

Written with the changes y − x and A² − B², whose means say the same in fewer digits.

Traps: B² stays fixed during local work, and only t · epsilon² stands for the squares since; the step that sees a
gradient does not divide by it. The paper has every worker in every round, with one number of local steps for all.
Nothing stays on a device, so a cohort of some devices runs it too, which the paper does not analyse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalSgd
from fedcore.algorithms.settings import choice, positive
from fedcore.schedule import Weighting


@dataclass(frozen=True, slots=True)
class LocalAdaAlter(LocalSgd):
    """Down: x and B², 2d. Up: the changes of both, 2d. Server state: x and B².

    client_lr: step size η of local steps.
    epsilon: ε, the stand-in for the size of one gradient.
    initial_b: B at the start, the paper's b₀.
    weighting: the paper is "uniform"; "examples" weighs a device by its number of examples.
    """

    name: ClassVar[str] = "localadaalter"
    family: ClassVar[str] = "averaging"

    client_lr: float = positive(0.5)
    epsilon: float = positive(1.0)
    initial_b: float = positive(1.0)
    weighting: Weighting = choice("uniform", "examples")

    def init(self, params_D: Vector) -> State:
        return {"params": params_D, "b2": 0.0 * params_D + self.initial_b**2}

    def broadcast(self, state: State) -> Broadcast:
        return dict(state)

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {"delta": carries["train"]["params"] - broadcast["params"], "squares": carries["train"]["squares"]}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return {"params": state["params"] + mean["delta"], "b2": state["b2"] + mean["squares"]}

    def _begin(self, broadcast: Broadcast) -> Carry:
        zeros_D = 0.0 * broadcast["params"]
        return {"params": broadcast["params"], "squares": zeros_D, "steps": zeros_D[..., :1]}

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(carry["params"])
        steps = carry["steps"] + 1
        divisor_D = (broadcast["b2"] + steps * self.epsilon**2) ** 0.5
        return {
            "params": carry["params"] - self.client_lr * gradient_D / divisor_D,
            "squares": carry["squares"] + gradient_D**2,
            "steps": steps,
        }
