"""FedNova: an average of deltas per local step, so that devices with many steps do not shift the optimum.

Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in heterogeneous federated optimization",
NeurIPS 2020, section 4.

    on the phone    y starts at the received x, u at 0, a and c at 0; for every batch
                        u ← ρ u + g(y) + μ (y − x),   y −= client_lr · u
                        c ← ρ c + 1 − client_lr · μ · a,   a += c
                    and it sends   d_i = (y_i − x) / a_i   and   a_i
    on the server   Δ = mean(a_i) · mean(d_i);   x += server_lr · Δ, or with momentum   v ← β v + Δ,  x += server_lr · v

a is how far y would go if every gradient were 1, in units of client_lr: K with plain SGD,
(K − ρ (1 − ρᴷ) / (1 − ρ)) / (1 − ρ) with momentum ρ, (1 − (1 − ημ)ᴷ) / (ημ) with the proximal term. Both together are
not in the paper; the recursion holds for them too. mean(a_i) is the paper's default for τ_eff. With μ > 0 the paper
also names mean(K_i), and its code takes that: longer steps than here, since a_i < K_i then.

Traps: K is the steps that a device takes, which depends on how many examples it has. The server multiplies two means.
A secure round clips a_i to clip_norm like any mean: clip_norm must be above the number of steps. client_lr · μ must be
below 1: above it a_i is no longer the paper's ‖a_i‖₁, and at 2 an even number of steps makes it 0, and d_i infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Broadcast, Carry, Gradient, Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalSgd, initial_state, server_sgd
from fedcore.algorithms.settings import choice, fraction, nonnegative, positive
from fedcore.schedule import Weighting


@dataclass(frozen=True, slots=True)
class FedNova(LocalSgd):
    """Down: d. Up: d + 1. Server state: the model; with server momentum also v.

    client_lr: step size η of local steps.
    server_lr: step size on Δ; 1 in the paper.
    client_momentum: ρ above.
    mu: μ above.
    server_momentum: β above.
    weighting: the paper weighs by "examples".
    """

    name: ClassVar[str] = "fednova"
    family: ClassVar[str] = "averaging"

    server_lr: float = positive(1.0)
    client_momentum: float = fraction(0.0)
    mu: float = nonnegative(0.0)
    server_momentum: float = fraction(0.0)
    weighting: Weighting = choice("examples", "uniform")

    def init(self, params_D: Vector) -> State:
        return initial_state(params_D, self.server_momentum)

    def report(self, broadcast: Broadcast, carries: Mapping[str, Carry]) -> Report:
        train = carries["train"]
        return {"direction": (train["params"] - broadcast["params"]) / train["a"], "a": train["a"]}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        delta_D = mean["a"] * mean["direction"]
        return server_sgd(state, delta_D, self.server_lr * step.lr_scale, self.server_momentum)

    def _begin(self, broadcast: Broadcast) -> Carry:
        zeros_D = 0.0 * broadcast["params"]
        return {"params": broadcast["params"], "u": zeros_D, "a": zeros_D[..., :1], "c": zeros_D[..., :1]}

    def _step(self, carry: Carry, broadcast: Broadcast, grad: Gradient) -> Carry:
        y_D = carry["params"]
        _, gradient_D, _ = grad(y_D)
        u_D = self.client_momentum * carry["u"] + gradient_D + self.mu * (y_D - broadcast["params"])
        c = self.client_momentum * carry["c"] + 1.0 - self.client_lr * self.mu * carry["a"]
        return {"params": y_D - self.client_lr * u_D, "u": u_D, "a": carry["a"] + c, "c": c}
