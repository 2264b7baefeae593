"""FedAvg with adaptive clipping: no delta is longer than a bound, below which a set share of users shall stay.

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS 2021; here
without noise.

    on the phone    Δ = (y − x) min(1, ρ / ‖y − x‖)    b = 1 if ‖y − x‖ ≤ ρ, else 0
    on the server   x += server_lr · mean(Δ)           ρ ← ρ exp(−clip_lr (mean(b) − quantile))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import e
from typing import TYPE_CHECKING, ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import choice, fraction, nonnegative, positive

if TYPE_CHECKING:
    from fedcore.report import Weighting


@dataclass(frozen=True, slots=True)
class ClippedFedAvg(LocalTraining):
    """Down: d + 1. Up: d + 1. Server state: the model and ρ.

    clip_norm: the first ρ.
    clip_lr: how fast ρ moves; 0 is fixed clipping.
    quantile: the share of users whose deltas shall keep their length.
    weighting: "uniform", as mean(b) is a share of users.
    """

    name: ClassVar[str] = "clipped-fedavg"
    family: ClassVar[str] = "averaging"

    weighting: Weighting = choice("uniform", "examples")
    clip_norm: float = positive(1.0)
    clip_lr: float = nonnegative(0.2)
    quantile: float = fraction(0.8)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D, "clip": 0.0 * params_D[:1] + self.clip_norm}

    def broadcast(self, state: State) -> Broadcast:
        return {"params": state["params"], "clip": state["clip"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        delta_D = carries["train"]["params"] - broadcast["params"]
        norm = (delta_D**2).sum(-1)[..., None] ** 0.5
        kept = 1.0 * (norm <= broadcast["clip"])
        return {"delta": delta_D * (kept + (1 - kept) * broadcast["clip"] / (norm + kept)), "kept": kept}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return {
            "params": state["params"] + self.server_lr * step.lr_scale * mean["delta"],
            "clip": state["clip"] * e ** (-self.clip_lr * (mean["kept"] - self.quantile)),
        }
