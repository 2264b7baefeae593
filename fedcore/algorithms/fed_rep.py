"""FedRep: every client fits a head of its own to the shared body, and then trains the body under that head.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized federated learning", ICML
2021, Algorithm 1. With w the shared parameters (the representation), and v_i those of client i (its head):

    on client i     head_epochs sweeps from v_i with w fixed; for every batch   v −= client_lr · g_v(w, v)
                    epochs sweeps with that v fixed; for every batch            y_w −= client_lr · g_w(y_w, v)
                    v_i = the trained v
    on the server   w += server_lr · mean(y_w − w)

Traps: many sweeps over the head and few over the body are the point; with the head trained least this is not FedRep.
Each pass has an optimizer state of its own. A client's first v_i is the checkpoint's v, and nothing improves that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass, Vector
from fedcore.algorithms.local_training import LocalTraining, PartlyLocal
from fedcore.algorithms.settings import choice, count
from fedcore.schedule import Loop, Weighting


@dataclass(frozen=True, slots=True)
class FedRep(PartlyLocal):
    """Down: d. Up: d, of which the local parameters are 0. Server state: the model. Client state: v_i.

    head_epochs: local sweeps over the head; 10 in the paper's experiments.
    epochs: local sweeps over the body; 1 or 5 in the paper's experiments.
    server_lr: step size on the mean delta; 1 in the paper.
    weighting: "uniform" is the paper's.
    """

    name: ClassVar[str] = "fedrep"

    weighting: Weighting = choice("uniform", "examples")
    head_epochs: int = count(5)

    @property
    def passes(self) -> tuple[Pass, ...]:
        head = Loop(batch_size=self.batch_size, epochs=self.head_epochs)
        return Pass("head", head, self._begin_head, self._step), self.training

    def _begin_head(self, received: Broadcast) -> Carry:
        carry = PartlyLocal._begin(self, received)
        return carry | {"trained": self.filled(0.0 * carry["params"], 1.0)}

    def _begin(self, received: Broadcast) -> Carry:
        carry = LocalTraining._begin(self, {"params": received["head.params"]})
        return carry | {"trained": self.filled(0.0 * carry["params"] + 1.0, 0.0)}

    def _step(self, carry: Carry, received: Broadcast, grad: Gradient) -> Carry:
        def of_trained(params_D: Vector) -> tuple[Vector, Vector, Vector]:
            loss, g_D, examples = grad(params_D)
            return loss, g_D * carry["trained"], examples

        return LocalTraining._step(self, carry, received, of_trained) | {"trained": carry["trained"]}
