"""FedSGD: one step of gradient descent a round, on the gradients of all devices.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017, section 2.

    on the phone    one sweep gathers g_i = ∇F_i(x)      all local examples, at the received x
    on the server   x −= server_lr · mean(g_i), or with momentum   v ← β v − mean(g_i),  x += server_lr · v

A round is FedAvg with one full-batch local step: the same model, for a device that need not hold its batch at once.
Trap: a full-batch gradient is Σ(batch mean · batch size) / n, not a mean of batch means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import full_gradient, initial_state, mean_gradient, server_sgd
from fedcore.algorithms.settings import choice, count, fraction, positive
from fedcore.schedule import Weighting


@dataclass(frozen=True, slots=True)
class FedSGD:
    """Down: d. Up: d. Server state: the model; with momentum also v.

    server_lr: step size on the mean gradient.
    server_momentum: β above; 0 is the paper's.
    batch_size: how many examples a device looks at together; it changes nothing but memory and round-off.
    weighting: "examples" is the paper's n_k / n; "uniform" weighs every device alike.
    """

    name: ClassVar[str] = "fedsgd"
    family: ClassVar[str] = "averaging"

    server_lr: float = positive(0.1)
    server_momentum: float = fraction(0.0)
    batch_size: int = count(20)
    weighting: Weighting = choice("examples", "uniform")

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (full_gradient(self.batch_size),)

    def init(self, params_D: Vector) -> State:
        return initial_state(params_D, self.server_momentum)

    def broadcast(self, state: State) -> Broadcast:
        return {"params": state["params"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {"gradient": mean_gradient(carries["sweep"])}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return server_sgd(state, -mean["gradient"], self.server_lr * step.lr_scale, self.server_momentum)
