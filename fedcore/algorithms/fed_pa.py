"""FedPA: devices correct their deltas by the covariance of samples of their local posterior.

Al-Shedivat, Gillenwater, Xing, Rostamizadeh, "Federated learning via posterior averaging: a new perspective and
practical algorithms", ICLR 2021. Samples are made by its IASG.

    on the phone    y starts at the received x; for every batch   y −= client_lr · g(y)
                    after the burn-in, the mean of every `steps_per_sample` models y in a row is a sample s_1 … s_l
                    Δ_i = Σ⁻¹ (mean(s) − x),   Σ = r I + (1 − r) S,   r = 1 / (1 + (l − 1) ρ)
    on the server   x += server_lr · mean(Δ_i), or with momentum   v ← β v + mean(Δ_i),  x += server_lr · v

S is the unbiased covariance of the samples. Σ is never made: with u_t = s_t − mean(s_1 … s_{t−1}) and
γ_t = ρ (t − 1) / t, it is r times I plus the sum of γ_t u_t u_tᵀ over t = 2 … l. Its inverse on a vector takes O(l² d)
by the formula of Sherman and Morrison, as in the paper's appendix.

With ρ = 0 or l = 1, Δ is mean(s) − x. Traps: every device takes `burn_in_steps` + l · `steps_per_sample` steps, however
many examples it has; a sample is the mean over one epoch, as in the paper, if that many steps are one. In the first
`burn_in_rounds` rounds, x is far from every optimum, samples say nothing, and Δ is y − x as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Pass, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import initial_state, server_sgd
from fedcore.algorithms.settings import choice, count, fraction, nonnegative, positive, whole
from fedcore.schedule import Loop, Weighting


@dataclass(frozen=True, slots=True)
class FedPA:
    """Down: d. Up: d. Server state: the model; with momentum also v. A phone keeps (l + 1) d.

    With rounds of burn-in, the round is in the state, and whether to sample goes down too.

    client_lr: step size of local SGD.
    server_lr: step size on the mean delta.
    server_momentum: β above.
    rho: ρ above, how much the samples' covariance counts.
    samples: l above.
    steps_per_sample: local steps whose models make one sample.
    burn_in_steps: local steps before the first sample.
    burn_in_rounds: rounds of FedAvg before the first of FedPA.
    batch_size: batch size of local steps.
    weighting: the paper weighs by "examples".
    """

    name: ClassVar[str] = "fedpa"
    family: ClassVar[str] = "posterior"

    client_lr: float = positive(0.1)
    server_lr: float = positive(1.0)
    server_momentum: float = fraction(0.0)
    rho: float = nonnegative(0.01)
    samples: int = count(5)
    steps_per_sample: int = count(5)
    burn_in_steps: int = whole(5)
    burn_in_rounds: int = whole(0)
    batch_size: int = count(20)
    weighting: Weighting = choice("examples", "uniform")

    @property
    def passes(self) -> tuple[Pass, ...]:
        # As many epochs as steps, because an epoch has at least one.
        steps = self.burn_in_steps + self.samples * self.steps_per_sample
        return (Pass("train", Loop(batch_size=self.batch_size, epochs=steps, steps=steps), self._begin, self._step),)

    def init(self, params_D: Vector) -> State:
        state = initial_state(params_D, self.server_momentum)
        return state | {"round": 0.0 * params_D[..., :1]} if self.burn_in_rounds else state

    def broadcast(self, state: State) -> Broadcast:
        sampling = {"sampling": _reached(state["round"], self.burn_in_rounds)} if self.burn_in_rounds else {}
        return {"params": state["params"]} | sampling

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        """Δ_i, (D,): Σ⁻¹ times the mean of the samples less x, or y − x in the first `burn_in_rounds` rounds."""
        x_D, train = broadcast["params"], carries["train"]
        samples = [train[f"sample{number}"] - x_D for number in range(self.samples)]
        delta_D = self._corrected(samples)
        if self.burn_in_rounds:
            sampling = broadcast["sampling"]
            delta_D = sampling * delta_D + (1.0 - sampling) * (train["params"] - x_D)
        return {"delta": delta_D}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        moved = server_sgd(state, mean["delta"], self.server_lr * step.lr_scale, self.server_momentum)
        return moved | {"round": state["round"] + 1.0} if self.burn_in_rounds else moved

    def _begin(self, broadcast: Broadcast) -> Carry:
        x_D = broadcast["params"]
        samples = {f"sample{number}": 0.0 * x_D for number in range(self.samples)}
        return {"params": x_D, "steps": 0.0 * x_D[..., :1]} | samples

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        _, gradient_D, _ = grad(carry["params"])
        y_D, length = carry["params"] - self.client_lr * gradient_D, self.steps_per_sample
        moved = {"params": y_D, "steps": carry["steps"] + 1.0}
        for number in range(self.samples):
            first = self.burn_in_steps + number * length
            counts = _reached(carry["steps"], first) - _reached(carry["steps"], first + length)
            moved[f"sample{number}"] = carry[f"sample{number}"] + counts / length * y_D
        return moved

    def _corrected(self, samples_D: list[Vector]) -> Vector:
        """Σ⁻¹ of the mean of `samples_D`, which are given relative to x."""
        mean_D = delta_D = samples_D[0]
        solved: list[tuple[Vector, Vector]] = []  # v_t = (I + Σ_{k<t} γ_k u_k u_kᵀ)⁻¹ u_t, γ_t / (1 + γ_t u_tᵀ v_t)
        for t, sample_D in enumerate(samples_D[1:], 2):
            u_D, gamma = sample_D - mean_D, self.rho * (t - 1) / t
            mean_D = mean_D + u_D / t
            v_D = u_D
            for earlier_D, factor in solved:
                v_D = v_D - factor * _dot(earlier_D, u_D) * earlier_D
            divisor = 1.0 + gamma * _dot(u_D, v_D)
            delta_D = delta_D + v_D * (1 / t - gamma * _dot(u_D, delta_D)) / divisor
            solved.append((v_D, gamma / divisor))
        return delta_D * (1 + (len(samples_D) - 1) * self.rho)


def _reached(counter: Vector, threshold: int) -> Vector:
    """1 if a whole number is at least `threshold`, else 0, (1,)."""
    return (1.0 + abs(counter - (threshold - 1)) - abs(counter - threshold)) / 2.0


def _dot(a_D: Vector, b_D: Vector) -> Vector:
    """The inner product, (1,)."""
    return (a_D * b_D).sum(-1)[..., None]
