"""Local training: the steps of a client optimizer from the received model, and the server's step along a mean.

FedAvg, FedProx and the server optimizers differ in what the server does with the mean delta; the device's part is here.
Those that correct each local gradient, such as SCAFFOLD, have its part without optimizers.
With g the gradient on a batch at y, and y starting at the received x:

    sgd        y −= client_lr · g
    momentum   m ← β₁ m + g                                      y −= client_lr · m
    adam       m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²    y −= client_lr · m̂ / (√v̂ + ε)

with m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ) at the step t = 1, 2, … This Adam is that of Kingma and Ba, ICLR 2015.
Traps: m and v start at 0 in every round. In float32, 1 − β₂ᵗ would lose half of its digits; it is the sum of the
weights in v, and is summed with v: s₂ ← β₂ s₂ + (1 − β₂).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass, Report, State, Vector
from fedcore.algorithms.settings import choice, count, fraction, positive
from fedcore.schedule import Loop, Weighting

# Server SGD: the step of a server along a mean, with momentum or without.
#
# x += server_lr · Δ                               without momentum v ← β v + Δ,   x += server_lr · v
# with momentum β, as in FedAvgM


def initial_state(params_D: Vector, momentum: float) -> State:
    """The model, and v = 0 if there is momentum."""
    return {"params": params_D, "v": 0.0 * params_D} if momentum else {"params": params_D}


def server_sgd(state: State, direction_D: Vector, server_lr: float, momentum: float) -> State:
    """The state after one step along `direction_D`."""
    if not momentum:
        return {"params": state["params"] + server_lr * direction_D}
    v_D = momentum * state["v"] + direction_D
    return {"params": state["params"] + server_lr * v_D, "v": v_D}


@dataclass(frozen=True, slots=True)
class LocalSgd:
    """Local SGD from the received model along `local_gradient`, and how far it went. Down: d. Up: d.

    client_lr: step size of local training.
    epochs, batch_size: local sweeps and batch size.
    """

    client_lr: float = positive(0.1)
    epochs: int = count(1)
    batch_size: int = count(20)

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.training,)

    @property
    def training(self) -> Pass:
        """The pass `train`."""
        return Pass("train", Loop(batch_size=self.batch_size, epochs=self.epochs), self._begin, self._step)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D}

    def broadcast(self, state: State) -> Broadcast:
        return {"params": state["params"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {"delta": carries["train"]["params"] - broadcast["params"]}

    def local_gradient(self, params_D: Vector, broadcast: Broadcast, grad: Gradient) -> Vector:
        """What a local step goes down along: the gradient on the batch."""
        return grad(params_D)[1]

    def _begin(self, broadcast: Broadcast) -> Carry:
        return {"params": broadcast["params"]}

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        g_D = self.local_gradient(carry["params"], broadcast, grad)
        return {"params": carry["params"] - self.client_lr * g_D}


@dataclass(frozen=True, slots=True)
class LocalTraining(LocalSgd):
    """The device's part of an algorithm whose server needs only the mean delta. Down: d. Up: d.

    server_lr: step size of the server.
    weighting: the weight of a device in the mean, its "examples", or 1 if "uniform".
    client_optimizer: "sgd", "momentum" or "adam".
    client_beta1, client_beta2, client_epsilon: β₁, β₂, ε above; unused by "sgd", and the last two by "momentum".
    """

    server_lr: float = positive(1.0)
    weighting: Weighting = choice("examples", "uniform")
    client_optimizer: Literal["sgd", "momentum", "adam"] = choice("sgd", "momentum", "adam")
    client_beta1: float = fraction(0.9)
    client_beta2: float = fraction(0.999)
    client_epsilon: float = positive(1e-3)

    def _begin(self, broadcast: Broadcast) -> Carry:
        x_D = broadcast["params"]
        carry = {"params": x_D}
        if self.client_optimizer != "sgd":
            carry["m"] = 0.0 * x_D
        if self.client_optimizer == "adam":
            none = 0.0 * x_D[..., :1]
            carry |= {"v": 0.0 * x_D, "m_weight": none, "v_weight": none}
        return carry

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        g_D = self.local_gradient(carry["params"], broadcast, grad)
        if self.client_optimizer == "momentum":
            m_D = self.client_beta1 * carry["m"] + g_D
            return {"params": carry["params"] - self.client_lr * m_D, "m": m_D}
        if self.client_optimizer == "adam":
            return self._adam(carry, g_D)
        return {"params": carry["params"] - self.client_lr * g_D}

    def _adam(self, carry: Carry, g_D: Vector) -> Carry:
        m_D = self.client_beta1 * carry["m"] + (1 - self.client_beta1) * g_D
        v_D = self.client_beta2 * carry["v"] + (1 - self.client_beta2) * g_D**2
        m_weight = self.client_beta1 * carry["m_weight"] + (1 - self.client_beta1)
        v_weight = self.client_beta2 * carry["v_weight"] + (1 - self.client_beta2)
        u_D = (m_D / m_weight) / ((v_D / v_weight) ** 0.5 + self.client_epsilon)
        y_D = carry["params"] - self.client_lr * u_D
        return {"params": y_D, "m": m_D, "v": v_D, "m_weight": m_weight, "v_weight": v_weight}
