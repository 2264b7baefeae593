"""FedBuff: the server steps after every K deltas, although some start from older models than others.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated learning with buffered asynchronous aggregation",
AISTATS 2022, Algorithm 1. It is meant for tasks in mode "buffered", where devices come and report at their own speed
(docs/spec/rounds.md §10). s_i is the number of versions that were committed between the model x_b that device i
received and its report; the weights c_i are the paper's choice for old reports.

    on the phone    local training from the received x_b:  Δ_i = y_i − x_b
    on the server   x += server_lr · 1/K Σ c_i Δ_i                  over the K reports of a buffer, c_i = (1 + s_i)^−½

The mean that the server sees is Σ c_i Δ_i / Σ c_i, so it is multiplied by Σ c_i / K, the discount. Trap: without that
factor a buffer of old deltas alone would count as much as one of fresh ones. In rounds that wait for their cohort all
s_i are 0, and FedBuff is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Report, ServerStep, State
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import choice
from fedcore.schedule import Weighting


@dataclass(frozen=True, slots=True)
class FedBuff(LocalTraining):
    """Down: d. Up: d. Server state: only the model.

    server_lr: step size on the mean delta. Old deltas make training less stable: with many devices at work at once,
    take less than for FedAvg.
    weighting: the paper weighs devices alike, "uniform", but for their staleness.
    """

    name: ClassVar[str] = "fedbuff"
    family: ClassVar[str] = "averaging"

    weighting: Weighting = choice("uniform", "examples")

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        step_size = self.server_lr * step.lr_scale * step.discount
        return {"params": state["params"] + step_size * mean["delta"]}
