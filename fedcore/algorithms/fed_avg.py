"""FedAvg: the average of the models that devices reach by local SGD.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017, Algorithm 1. Written with deltas: averaging Δ_i = y_i − x and adding it to x is averaging y_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.local_sgd import local_sgd
from fedcore.algorithms.settings import choice, count, positive
from fedcore.loop import Loop

if TYPE_CHECKING:
    from fedcore.report import Weighting  # loads NumPy, which names and settings do not need


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Down: d. Up: d. Server state: only the model.

    client_lr: step size η of local SGD.
    server_lr: step size on the mean delta; 1 is the paper's averaging.
    epochs, batch_size: E and B of the paper.
    weighting: "examples" is the paper's n_k / n; "uniform" weighs every device alike.
    """

    name: ClassVar[str] = "fedavg"
    family: ClassVar[str] = "averaging"

    client_lr: float = positive(0.1)
    server_lr: float = positive(1.0)
    epochs: int = count(1)
    batch_size: int = count(20)
    weighting: Weighting = choice("examples", "uniform")

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (local_sgd(self.client_lr, Loop(batch_size=self.batch_size, epochs=self.epochs)),)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D}

    def broadcast(self, state: State) -> Broadcast:
        return {"params": state["params"]}

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        return {"delta": carries["train"]["params"] - broadcast["params"]}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        return {"params": state["params"] + self.server_lr * step.lr_scale * mean["delta"]}
