"""FedDyn: a term on every client that moves with it makes the local optima agree with the global one.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic regularization", ICLR
2021, Algorithm 1.

With l_i the client's vector (the paper's ∇L_i(θ_i)) and h the server's, both 0 at first; S is the cohort, N the number
of clients:

    on client i     y ≈ argmin F_i(y) − ⟨l_i, y⟩ + alpha/2 · ‖y − x‖²
                    here by local SGD from x: for every batch    y −= client_lr · (g(y) − l_i + alpha · (y − x))
                    l_i −= alpha · (y − x)
    on the server   h −= alpha · |S| / N · mean(y − x)
                    x = mean(y) − h / alpha

Traps: l_i moves by the y that was reached, whether or not it is the argmin. h moves before x uses it, and by the share
of all N clients, not of the cohort. The mean is uniform: h stays the mean of all l_i. A client_lr above 2 / alpha
diverges on the quadratic term alone.
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
class FedDyn(LocalSgd):
    """Down: d. Up: d. Server state: x and h. Client state: l_i, d.

    alpha: weight of the quadratic term; 0.001 to 0.1 in the paper's experiments.
    """

    name: ClassVar[str] = "feddyn"
    family: ClassVar[str] = "primal-dual"
    weighting: ClassVar[Weighting] = "uniform"

    alpha: float = positive(0.1)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D, "h": 0.0 * params_D}

    def init_client(self, params_D: Vector) -> ClientState:
        return {"l_i": 0.0 * params_D}

    def keep(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> ClientState:
        return {"l_i": broadcast["l_i"] - self.alpha * (carries["train"]["params"] - broadcast["params"])}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        h_D = state["h"] - self.alpha * step.participation * mean["delta"]
        return {"params": state["params"] + mean["delta"] - h_D / self.alpha, "h": h_D}

    def local_gradient(self, params_D: Vector, broadcast: Broadcast, grad: Gradient) -> Vector:
        return grad(params_D)[1] - broadcast["l_i"] + self.alpha * (params_D - broadcast["params"])
