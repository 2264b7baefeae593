"""DSVRG: every device runs the inner loop of SVRG from the cohort's full gradient. Two trips.

Konečný, McMahan, Ramage, "Federated optimization: distributed optimization beyond the datacenter", 2015, DSVRG. Their
FSVRG (`fsvrg.py`) builds on it.

    trip 1   on the phone    ∇F_i(x)                                                     all local examples
             on the server   c ← mean(∇F_i(x))
    trip 2   on the phone    w starts at the received x; m times, on a batch B of one example
                             w −= h · (g(w; B) − g(x; B) + c)
             on the server   x += server_lr · mean(w_i − x)

The paper draws examples with replacement. Here they come in shuffled sweeps, as many as m steps need.
Trap: every device takes the same number of steps, however many examples it has. Minimum and fixed point: c = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, State, Trip, Vector
from fedcore.algorithms.local_training import begin_state, gather_gradient, reduced_gradient, train
from fedcore.algorithms.settings import choice, count, positive
from fedcore.schedule import Loop, Weighting


@dataclass(frozen=True, slots=True)
class Dsvrg:
    """Down: d, then 2d. Up: d, then d. Server state: the model and c, 2d.

    client_lr: step size h.
    server_lr: step size on the mean delta; 1 in the paper.
    steps: m, local steps of every device.
    batch_size: examples of a local step; 1 in the paper.
    sweep_batch_size: examples at a time in trip 1, which changes nothing but the speed and round-off.
    weighting: the paper is "uniform" in trip 2; "examples" makes c the gradient of the mean over all examples.
    """

    name: ClassVar[str] = "dsvrg"
    family: ClassVar[str] = "variance reduction"

    client_lr: float = positive(0.01)
    server_lr: float = positive(1.0)
    steps: int = count(20)
    batch_size: int = count(1)
    sweep_batch_size: int = count(20)
    weighting: Weighting = choice("uniform", "examples")

    @property
    def trips(self) -> tuple[Trip, Trip]:
        # A sweep has at least one step, so that as many sweeps as steps are enough.
        loop = Loop(batch_size=self.batch_size, epochs=self.steps, steps=self.steps)
        return gather_gradient(self.sweep_batch_size), train(loop, self._step, self.server_lr)

    def init(self, params_D: Vector) -> State:
        return begin_state(params_D)

    def _step(self, carry: Carry, received: Broadcast, grad: Gradient) -> Carry:
        return {"params": carry["params"] - self.client_lr * reduced_gradient(carry, received, grad)}
