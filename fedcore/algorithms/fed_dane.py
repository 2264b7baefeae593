"""FedDane: devices minimise their loss, with its gradient at x replaced by the cohort's, near x. Two trips.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "FedDANE: a federated Newton-type method", Asilomar 2019, Algorithm 2.

    trip 1   on the phone    ∇F_i(x)                                                     all local examples
             on the server   g ← mean(∇F_i(x))
    trip 2   on the phone    ∇F_i(x) once more, as no trip keeps it; then y starts at the received x and goes down
                             F_i(y) + ⟨g − ∇F_i(x), y − x⟩ + μ/2 ‖y − x‖², by SGD: for every batch B
                             y −= client_lr · (g(y; B) + g − ∇F_i(x) + μ (y − x))
             on the server   x += server_lr · mean(y_i − x)

The paper draws a cohort for each trip, and solves the local problem by any solver, to any accuracy.

Trap: ∇F_i(x) is over all local examples, not over the batch of the step: that would be Mime with SGD. The two are one
for full batches, the same cohort and μ = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, State, Trip, Vector
from fedcore.algorithms.local_training import begin_state, full_gradient, gather_gradient, received_gradient, train
from fedcore.algorithms.settings import choice, count, nonnegative, positive
from fedcore.schedule import Loop, Weighting


@dataclass(frozen=True, slots=True)
class FedDane:
    """Down: d, then 2d. Up: d, then d. Server state: the model and g, 2d.

    client_lr: step size of local SGD.
    server_lr: step size on the mean delta; 1 in the paper.
    mu: weight μ of the proximal term; 0 in most of the paper's experiments.
    epochs, batch_size: local sweeps and batch size.
    weighting: the paper is "uniform"; "examples" weighs a device by its number of examples.
    """

    name: ClassVar[str] = "feddane"
    family: ClassVar[str] = "newton-like"

    client_lr: float = positive(0.1)
    server_lr: float = positive(1.0)
    mu: float = nonnegative(0.0)
    epochs: int = count(1)
    batch_size: int = count(20)
    weighting: Weighting = choice("uniform", "examples")

    @property
    def trips(self) -> tuple[Trip, Trip]:
        loop = Loop(batch_size=self.batch_size, epochs=self.epochs)
        return gather_gradient(self.batch_size), train(loop, self._step, self.server_lr, full_gradient(self.batch_size))

    def init(self, params_D: Vector) -> State:
        return begin_state(params_D)

    def _step(self, carry: Carry, received: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(carry["params"])
        correction_D = received["gradient"] - received_gradient(received)
        pull_D = self.mu * (carry["params"] - received["params"])
        return {"params": carry["params"] - self.client_lr * (gradient_D + correction_D + pull_D)}
