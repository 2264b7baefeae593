"""FedAdam: the mean delta is a pseudo-gradient for an adaptive server optimizer.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021,
Algorithm 2. Trap: this is not torch's Adam. There is no bias correction, τ stands outside the root, v starts at τ².
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.local_sgd import local_sgd
from fedcore.algorithms.settings import choice, count, fraction, positive
from fedcore.loop import Loop

if TYPE_CHECKING:
    from fedcore.report import Weighting  # loads NumPy, which names and settings do not need


@dataclass(frozen=True, slots=True)
class FedAdam:
    """Down: d. Up: d. Server state: the model and two moments, 3d.

    client_lr: step size η_l of local SGD.
    server_lr: step size η of the server.
    beta1, beta2: decay of the first and second moment.
    tau: degree of adaptivity τ; v starts at τ², as in the paper.
    epochs, batch_size: local sweeps and batch size.
    weighting: the paper's experiments weigh by "examples", its analysis is "uniform".
    """

    name: ClassVar[str] = "fedadam"
    family: ClassVar[str] = "server optimizer"

    client_lr: float = positive(0.1)
    server_lr: float = positive(0.03)
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.99)
    tau: float = positive(1e-3)
    epochs: int = count(1)
    batch_size: int = count(20)
    weighting: Weighting = choice("examples", "uniform")

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (local_sgd(self.client_lr, Loop(batch_size=self.batch_size, epochs=self.epochs)),)

    def init(self, params_D: Vector) -> State:
        zeros_D = 0.0 * params_D
        return {"params": params_D, "m": zeros_D, "v": zeros_D + self.tau**2}

    def broadcast(self, state: State) -> Broadcast:
        return {"params": state["params"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {"delta": carries["train"]["params"] - broadcast["params"]}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        m_D = self.beta1 * state["m"] + (1 - self.beta1) * mean["delta"]
        v_D = self.beta2 * state["v"] + (1 - self.beta2) * mean["delta"] ** 2
        server_lr = self.server_lr * step.lr_scale
        return {"params": state["params"] + server_lr * m_D / (v_D**0.5 + self.tau), "m": m_D, "v": v_D}
