"""FedPD: every client solves an augmented Lagrangian of its own, and the server averages what they propose.

Zhang, Hong, Dhople, Yin, Liu, "FedPD: a federated learning framework with adaptivity to non-IID data", IEEE
Transactions on Signal Processing 69, 2021, Algorithm 1. The local problem is solved by SGD (the paper's Oracle I), and
no round goes without communication (its p = 0).

With y_i the client's own model, at first that of round 0, and λ_i its dual vector, 0 at first:

    on client i     y_i ≈ argmin F_i(y) + ⟨λ_i, y − x⟩ + ‖y − x‖² / (2 · eta)
                    by SGD from the y_i of the client's last round; for every batch
                        y_i −= client_lr · (g(y_i) + λ_i + (y_i − x) / eta)
                    λ_i += (y_i − x) / eta
                    sends y_i + eta · λ_i                        with the new λ_i
    on the server   x = mean(y_i + eta · λ_i)

Traps: local steps begin at y_i, not at the received x. The paper has all clients in every round; with a smaller cohort
the mean is that of the cohort, y_i is as old as the client's last round, and the paper proves nothing. The mean is
uniform. With all clients and exact solutions it is FedDyn with alpha = 1 / eta and l_i = −λ_i; a few local steps begin
elsewhere there. A client_lr above 2 · eta diverges on the quadratic term alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, ClientState, Gradient, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalSgd
from fedcore.algorithms.settings import positive
from fedcore.schedule import Weighting


@dataclass(frozen=True, slots=True)
class FedPD(LocalSgd):
    """Down: d. Up: d. Server state: only the model. Client state: y_i and λ_i, 2d.

    eta: the inverse weight of the quadratic term.
    """

    name: ClassVar[str] = "fedpd"
    family: ClassVar[str] = "primal-dual"
    weighting: ClassVar[Weighting] = "uniform"

    eta: float = positive(10.0)

    def init_client(self, params_D: Vector) -> ClientState:
        return {"dual": 0.0 * params_D, "own": 1.0 * params_D}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        kept = self.keep(broadcast, carries)
        return {"proposal": kept["own"] + self.eta * kept["dual"]}

    def keep(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> ClientState:
        own_D = carries["train"]["params"]
        return {"dual": broadcast["dual"] + (own_D - broadcast["params"]) / self.eta, "own": own_D}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return {"params": mean["proposal"]}

    def _begin(self, broadcast: Broadcast) -> Carry:
        return {"params": broadcast["own"]}

    def local_gradient(self, params_D: Vector, broadcast: Broadcast, grad: Gradient) -> Vector:
        return grad(params_D)[1] + broadcast["dual"] + (params_D - broadcast["params"]) / self.eta
