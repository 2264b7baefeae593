"""FedProx: local training that is held near the received model by a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks", MLSys 2020,
Algorithm 2.

    on the phone    y starts at the received x; for every batch   y −= client_lr · (g(y) + μ (y − x))
    on the server   x += server_lr · mean(y_i − x), or with momentum   v ← β v + mean(y_i − x),  x += server_lr · v

The local objective is F_i(y) + μ/2 ‖y − x‖². With another client optimizer, its gradient goes into that.
Trap: the first local step starts at x, where the term is 0; one step of FedProx is one of FedAvg, whatever μ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Gradient, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalTraining, initial_state, server_sgd
from fedcore.algorithms.settings import choice, fraction, nonnegative
from fedcore.schedule import Weighting


@dataclass(frozen=True, slots=True)
class FedProx(LocalTraining):
    """Down: d. Up: d. Server state: the model; with momentum also v.

    mu: μ above; 0 is FedAvg of the same weighting, which by default is "examples" there and "uniform" here.
    server_lr: step size on the mean delta; 1 in the paper.
    server_momentum: β above; 0 in the paper.
    weighting: the paper draws devices with probability n_k / n and averages them alike, "uniform". Where devices are
        drawn alike, as here, "examples" has the same mean.
    """

    name: ClassVar[str] = "fedprox"
    family: ClassVar[str] = "averaging"

    weighting: Weighting = choice("uniform", "examples")
    mu: float = nonnegative(0.01)
    server_momentum: float = fraction(0.0)

    def init(self, params_D: Vector) -> State:
        return initial_state(params_D, self.server_momentum)

    def local_gradient(self, params_D: Vector, broadcast: Broadcast, grad: Gradient) -> Vector:
        return grad(params_D)[1] + self.mu * (params_D - broadcast["params"])

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return server_sgd(state, mean["delta"], self.server_lr * step.lr_scale, self.server_momentum)
