"""FSVRG: SVRG on devices that hold unequally many examples, with smaller steps where there are more. Two trips.

Konečný, McMahan, Ramage, "Federated optimization: distributed optimization beyond the datacenter", 2015, FSVRG. Here it
is for dense features, see below.

    trip 1   on the phone    ∇F_i(x)                                                     all local examples
             on the server   c ← Σ (n_i / n) ∇F_i(x)
    trip 2   on the phone    n_i, counted by a sweep; then w starts at the received x, and for every example j
                             w −= h / n_i · (∇f_j(w) − ∇f_j(x) + c)                      one sweep, shuffled
             on the server   x += server_lr · Σ (n_i / n) (w_i − x)

The paper also scales coordinates: S_i = φ / φ_i on the phone and A = K / ω on the server, where φ and φ_i are how
often a feature is not zero among all examples and among the device's, and ω is the number of devices that have it. It
is left out for two reasons. An algorithm sees gradients and no examples: they say which features an example has for a
linear model only, and only one example at a time. And the cohort of trip 1 would have to stand for the population: a
rare feature that it did not see gets φ = 0, and those are the features that the scaling is for. Where no feature is
ever zero all of them are 1, and this is the paper's algorithm.

Trap: a larger batch takes one step of the size of one example's, so a sweep then goes less far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass, State, Trip, Vector
from fedcore.algorithms.local_training import begin_state, gather_gradient, reduced_gradient, train
from fedcore.algorithms.settings import choice, count, positive
from fedcore.schedule import Loop, Weighting


@dataclass(frozen=True, slots=True)
class Fsvrg:
    """Down: d, then 2d. Up: d, then d. Server state: the model and c, 2d.

    client_lr: step size h; a step on a device with n_i examples is h / n_i.
    server_lr: step size on the mean delta; 1 where A is.
    epochs, batch_size: local sweeps, and examples of a local step; both are 1 in the paper.
    sweep_batch_size: examples at a time where gradients are gathered or examples counted; it changes only the speed.
    weighting: "examples" is the paper's n_i / n.
    """

    name: ClassVar[str] = "fsvrg"
    family: ClassVar[str] = "variance reduction"

    client_lr: float = positive(1.0)
    server_lr: float = positive(1.0)
    epochs: int = count(1)
    batch_size: int = count(1)
    sweep_batch_size: int = count(20)
    weighting: Weighting = choice("examples", "uniform")

    @property
    def trips(self) -> tuple[Trip, Trip]:
        counting = Pass("count", Loop(batch_size=self.sweep_batch_size, shuffle=False), self._begin_count, self._count)
        loop = Loop(batch_size=self.batch_size, epochs=self.epochs)
        return gather_gradient(self.sweep_batch_size), train(loop, self._step, self.server_lr, counting)

    def init(self, params_D: Vector) -> State:
        return begin_state(params_D)

    def _begin_count(self, broadcast: Broadcast) -> Carry:
        return {"examples": 0.0 * broadcast["params"][..., :1]}

    def _count(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, _, examples = grad(broadcast["params"])
        return {"examples": carry["examples"] + examples}

    def _step(self, carry: Carry, received: Broadcast, grad: Gradient) -> Carry:
        h = self.client_lr / received["count.examples"]
        return {"params": carry["params"] - h * reduced_gradient(carry, received, grad)}
