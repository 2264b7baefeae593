"""SCAFFOLD: control variates correct the drift of local steps on clients with different data.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for federated learning",
ICML 2020, Algorithm 1.

With c the server's control variate and c_i that of client i, both 0 at first; S is the cohort, N the number of clients:

    on client i     y starts at the received x; for each of K batches    y −= client_lr · (g(y) − c_i + c)
                    option I    c_i⁺ = ∇F_i(x)                           one more sweep over all local examples
                    option II   c_i⁺ = c_i − c + (x − y) / (K · client_lr)
    on the server   x += server_lr · mean(y − x)
                    c += |S| / N · mean(c_i⁺ − c_i)

Traps: K is the number of steps that this client took, which differs where clients hold different numbers of examples.
The mean is uniform: c stays the mean of all c_i. Both ends move by the old c and c_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcore.algorithms.algorithm import (
    Broadcast,
    Carry,
    ClientState,
    Gradient,
    Pass,
    Report,
    ServerStep,
    State,
    Vector,
)
from fedcore.algorithms.local_training import LocalSgd, full_gradient, mean_gradient
from fedcore.algorithms.settings import choice, positive
from fedcore.schedule import Weighting


@dataclass(frozen=True, slots=True)
class Scaffold(LocalSgd):
    """Down: x and c, 2d. Up: the changes of y and c_i, 2d. Server state: x and c. Client state: c_i, d.

    option: the client's next control variate, "I" or "II" above; "I" costs one more sweep.
    server_lr: step size on the mean delta; 1 in the paper's experiments.
    epochs, batch_size: local sweeps and batch size; K follows from them.
    """

    name: ClassVar[str] = "scaffold"
    family: ClassVar[str] = "variance reduction"
    weighting: ClassVar[Weighting] = "uniform"

    option: Literal["II", "I"] = choice("II", "I")
    server_lr: float = positive(1.0)

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.training, full_gradient(self.batch_size)) if self.option == "I" else (self.training,)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D, "c": 0.0 * params_D}

    def init_client(self, params_D: Vector) -> ClientState:
        return {"c_i": 0.0 * params_D}

    def broadcast(self, state: State) -> Broadcast:
        return dict(state)

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {
            "delta": carries["train"]["params"] - broadcast["params"],
            "delta_c": self._next_c_i(broadcast, carries) - broadcast["c_i"],
        }

    def keep(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> ClientState:
        return {"c_i": self._next_c_i(broadcast, carries)}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return {
            "params": state["params"] + self.server_lr * step.lr_scale * mean["delta"],
            "c": state["c"] + step.participation * mean["delta_c"],
        }

    def _begin(self, broadcast: Broadcast) -> Carry:
        return {"params": broadcast["params"], "steps": 0.0 * broadcast["params"][..., :1]}

    def local_gradient(self, params_D: Vector, broadcast: Broadcast, grad: Gradient) -> Vector:
        return grad(params_D)[1] - broadcast["c_i"] + broadcast["c"]

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        return LocalSgd._step(self, carry, broadcast, grad) | {"steps": carry["steps"] + 1}

    def _next_c_i(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Vector:
        """c_i⁺, by the chosen option."""
        if self.option == "I":
            return mean_gradient(carries["sweep"])
        train = carries["train"]
        drift_D = (broadcast["params"] - train["params"]) / (train["steps"] * self.client_lr)
        return broadcast["c_i"] - broadcast["c"] + drift_D
