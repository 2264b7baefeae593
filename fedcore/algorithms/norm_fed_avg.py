"""Normalised FedAvg: a server step of fixed length along the mean delta.

Charles, Garrett, Huo, Shmulyian, Smith, "On large-cohort training for federated learning", NeurIPS 2021. The
mean of many deltas is short, because they point in different directions; the step does not shrink with it.

    on the phone    local training from the received x
    on the server   x += server_lr · Δ / ‖Δ‖₂      Δ = mean(y_i − x); no step if it is 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Report, ServerStep, State
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import positive


@dataclass(frozen=True, slots=True)
class NormFedAvg(LocalTraining):
    """Down: d. Up: d. Server state: only the model.

    server_lr: length of the server's step, ‖x_new − x‖₂.
    weighting: the paper weighs by "examples".
    """

    name: ClassVar[str] = "normfedavg"
    family: ClassVar[str] = "averaging"

    server_lr: float = positive(0.3)

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        norm = (mean["delta"] ** 2).sum(-1)[..., None] ** 0.5
        direction_D = mean["delta"] / (norm + (norm == 0))
        return {"params": state["params"] + self.server_lr * step.lr_scale * direction_D}
