"""FedAvg: the average of the models that devices reach by local SGD.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017, Algorithm 1. Written with deltas: averaging Δ_i = y_i − x and adding it to x is averaging y_i.

    on the phone    y starts at the received x; for every batch   y −= client_lr · g(y)
    on the server   x += server_lr · mean(y_i − x)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Report, ServerStep, State
from fedcore.algorithms.local_training import LocalTraining


@dataclass(frozen=True, slots=True)
class FedAvg(LocalTraining):
    """Down: d. Up: d. Server state: only the model.

    server_lr: step size on the mean delta; 1 is the paper's averaging.
    epochs, batch_size: E and B of the paper.
    weighting: "examples" is the paper's n_k / n; "uniform" weighs every device alike.
    """

    name: ClassVar[str] = "fedavg"
    family: ClassVar[str] = "averaging"

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return {"params": state["params"] + self.server_lr * step.lr_scale * mean["delta"]}
