"""FedAdagrad: a server step that is divided by the root of all squared mean deltas so far.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021,
Algorithm 2.

    on the phone    local training from the received x
    on the server   m ← β₁ m + (1 − β₁) Δ      Δ = mean(y_i − x)
                    v ← v + Δ²
                    x += server_lr · m / (√v + τ)

Traps: v starts at τ² in the paper and at 0 in its experiments. τ stands outside the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcore.algorithms.algorithm import Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import choice, fraction, positive


@dataclass(frozen=True, slots=True)
class FedAdagrad(LocalTraining):
    """Down: d. Up: d. Server state: the model and v, 2d; with β₁ above 0 also m.

    server_lr: step size η of the server.
    beta1: decay of the first moment; 0 in the paper's experiments, so that m is Δ.
    tau: degree of adaptivity τ.
    form: where v starts: at τ² in the "paper", at 0 in its "released" experiments.
    weighting: the paper's experiments weigh by "examples", its analysis is "uniform".
    """

    name: ClassVar[str] = "fedadagrad"
    family: ClassVar[str] = "server optimizer"

    server_lr: float = positive(0.03)
    beta1: float = fraction(0.0)
    tau: float = positive(1e-3)
    form: Literal["paper", "released"] = choice("paper", "released")

    def init(self, params_D: Vector) -> State:
        zeros_D = 0.0 * params_D
        state = {"params": params_D, "v": zeros_D + (self.tau**2 if self.form == "paper" else 0.0)}
        return state | {"m": zeros_D} if self.beta1 else state

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        """One step of Adagrad on Δ = mean["delta"], (D,). Without β₁ the state has no m, and Δ is in its place."""
        m_D = self.beta1 * state["m"] + (1 - self.beta1) * mean["delta"] if self.beta1 else mean["delta"]
        v_D = state["v"] + mean["delta"] ** 2
        server_lr = self.server_lr * step.lr_scale
        moved = {"params": state["params"] + server_lr * m_D / (v_D**0.5 + self.tau), "v": v_D}
        return moved | {"m": m_D} if self.beta1 else moved
