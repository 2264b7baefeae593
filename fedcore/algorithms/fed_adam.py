"""FedAdam: the mean delta is a pseudo-gradient for an adaptive server optimizer.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021,
Algorithm 2. `form` also offers Adam (Kingma, Ba, ICLR 2015) as libraries have it, with which papers are reproduced.

    on the phone    local training from the received x
    on the server   m ← β₁ m + (1 − β₁) Δ      Δ = mean(y_i − x)
                    v ← β₂ v + (1 − β₂) Δ²
                    x += server_lr · u

    form       v starts at   u, with τ as ε and rounds t = 1, 2, …
    paper      τ²            m / (√v + τ)
    released   0             m / (√v + τ)                                      the paper's experiments
    keras      0             m √(1 − β₂ᵗ) / (1 − β₁ᵗ) / (√v + τ)               Keras; Kingma and Ba, section 2
    torch      0             m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + τ)            torch, optax; Kingma and Ba, Algorithm 1

Trap: these are four algorithms. The paper's has no bias correction; in Keras ε is not corrected, in torch it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcore.algorithms.algorithm import Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import choice, fraction, positive


@dataclass(frozen=True, slots=True)
class FedAdam(LocalTraining):
    """Down: d. Up: d. Server state: the model and two moments, 3d; with bias correction also the round.

    server_lr: step size η of the server.
    beta1, beta2: decay of the first and second moment.
    tau: degree of adaptivity τ, which libraries call ε.
    form: "paper", "released", "keras" or "torch", as above.
    weighting: the paper's experiments weigh by "examples", its analysis is "uniform".
    """

    name: ClassVar[str] = "fedadam"
    family: ClassVar[str] = "server optimizer"

    server_lr: float = positive(0.03)
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.99)
    tau: float = positive(1e-3)
    form: Literal["paper", "released", "keras", "torch"] = choice("paper", "released", "keras", "torch")

    def init(self, params_D: Vector) -> State:
        zeros_D = 0.0 * params_D
        initial_v = self.tau**2 if self.form == "paper" else 0.0
        state = {"params": params_D, "m": zeros_D, "v": zeros_D + initial_v}
        return state | {"round": zeros_D[..., :1]} if self._corrected else state

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        """One step of Adam on Δ = mean["delta"], (D,), in the form that is set; forms with corrections count rounds."""
        m_D = self.beta1 * state["m"] + (1 - self.beta1) * mean["delta"]
        v_D = self.second_moment(state["v"], mean["delta"] ** 2)
        moved = {"m": m_D, "v": v_D}
        server_lr = self.server_lr * step.lr_scale
        if self._corrected:
            moved["round"] = state["round"] + 1
            correction1, correction2 = 1 - self.beta1 ** moved["round"], 1 - self.beta2 ** moved["round"]
            if self.form == "keras":
                server_lr = server_lr * correction2**0.5
            else:
                v_D = v_D / correction2
            server_lr = server_lr / correction1
        return {"params": state["params"] + server_lr * m_D / (v_D**0.5 + self.tau)} | moved

    def second_moment(self, v_D: Vector, square_D: Vector) -> Vector:
        """The next v, from Δ²."""
        return self.beta2 * v_D + (1 - self.beta2) * square_D

    @property
    def _corrected(self) -> bool:
        """Whether the bias of the moments, which start at 0, is corrected."""
        return self.form in {"keras", "torch"}
