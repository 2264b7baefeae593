"""FedAvgM: FedAvg with momentum on the server.

Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019.

    on the phone    local training from the received x
    on the server   v ← β v + Δ        Δ = mean(y_i − x)
                    x += server_lr · v, or with Nesterov's momentum   x += server_lr · (Δ + β v)

Trap: v is not damped by 1 − β, so at a steady Δ the step is 1 / (1 − β) times that of FedAvg: 10 times at β = 0.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import flag, fraction


@dataclass(frozen=True, slots=True)
class FedAvgM(LocalTraining):
    """Down: d. Up: d. Server state: the model and v, 2d.

    server_lr: step size on v; 1 in the paper.
    momentum: β above.
    nesterov: whether the momentum is that of Nesterov.
    weighting: the paper weighs by "examples".
    """

    name: ClassVar[str] = "fedavgm"
    family: ClassVar[str] = "server optimizer"

    momentum: float = fraction(0.9)
    nesterov: bool = flag(False)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D, "v": 0.0 * params_D}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        v_D = self.momentum * state["v"] + mean["delta"]
        direction_D = mean["delta"] + self.momentum * v_D if self.nesterov else v_D
        return {"params": state["params"] + self.server_lr * step.lr_scale * direction_D, "v": v_D}
