"""FedYogi: FedAdam whose second moment moves by the size of Δ² alone, and so never jumps.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021,
Algorithm 2. Yogi is of Zaheer, Reddi, Sachan, Kale, Kumar, NeurIPS 2018.

    on the phone    local training from the received x
    on the server   m ← β₁ m + (1 − β₁) Δ                      Δ = mean(y_i − x)
                    v ← v − (1 − β₂) Δ² sign(v − Δ²)
                    x += server_lr · m / (√v + τ)

Traps: there is no bias correction, and τ stands outside the root. v starts at τ² in the paper and at 0 in its
experiments. Where v equals Δ², it stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcore.algorithms.algorithm import Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import choice, fraction, positive


@dataclass(frozen=True, slots=True)
class FedYogi(LocalTraining):
    """Down: d. Up: d. Server state: the model and two moments, 3d.

    server_lr: step size η of the server.
    beta1, beta2: decay of the first and second moment.
    tau: degree of adaptivity τ.
    form: where v starts: at τ² in the "paper", at 0 in its "released" experiments.
    weighting: the paper's experiments weigh by "examples", its analysis is "uniform".
    """

    name: ClassVar[str] = "fedyogi"
    family: ClassVar[str] = "server optimizer"

    server_lr: float = positive(0.03)
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.99)
    tau: float = positive(1e-3)
    form: Literal["paper", "released"] = choice("paper", "released")

    def init(self, params_D: Vector) -> State:
        zeros_D = 0.0 * params_D
        initial_v = self.tau**2 if self.form == "paper" else 0.0
        return {"params": params_D, "m": zeros_D, "v": zeros_D + initial_v}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        """One step of Yogi on Δ = mean["delta"], (D,)."""
        m_D = self.beta1 * state["m"] + (1 - self.beta1) * mean["delta"]
        square_D = mean["delta"] ** 2
        signed_D = (state["v"] > square_D) * square_D - (state["v"] < square_D) * square_D
        v_D = state["v"] - (1 - self.beta2) * signed_D
        server_lr = self.server_lr * step.lr_scale
        return {"params": state["params"] + server_lr * m_D / (v_D**0.5 + self.tau), "m": m_D, "v": v_D}
