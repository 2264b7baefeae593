"""FedLamb: Adam on the server, whose step in every layer is scaled to the size of the layer's weights.

Charles, Garrett, Huo, Shmulyian, Smith, "On large-cohort training for federated learning", NeurIPS 2021. The server
optimizer is LAMB of You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020.

    on the phone    local training from the received x
    on the server   m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²      g = −mean(y_i − x)
                    u = m̂ / (√v̂ + ε) + λ x                              m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
                    x −= server_lr · r · u           in every layer, r = ‖x‖ / ‖u‖, or 1 if either norm is 0

A layer is a tensor of the model, t = 1, 2, … the round. Traps: unlike FedAdam this corrects the bias of both moments;
weight decay enters after the division by √v̂.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Report, ServerStep, State, Vector
from fedcore.algorithms.fed_lars import trust_ratio
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import fraction, nonnegative, positive


@dataclass(frozen=True, slots=True)
class FedLamb(LocalTraining):
    """Down: d. Up: d. Server state: the model, two moments and the round, 3d + 1.

    server_lr: step size of the server, relative to the size of a layer.
    beta1, beta2: decay of the first and second moment.
    weight_decay: λ above.
    epsilon: ε above.
    weighting: the paper weighs by "examples".
    """

    name: ClassVar[str] = "fedlamb"
    family: ClassVar[str] = "server optimizer"

    server_lr: float = positive(0.03)
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.99)
    weight_decay: float = nonnegative(0.0)
    epsilon: float = positive(1e-3)

    def init(self, params_D: Vector) -> State:
        zeros_D = 0.0 * params_D
        return {"params": params_D, "m": zeros_D, "v": zeros_D, "round": zeros_D[..., :1]}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        """One step of LAMB on −Δ, Δ = mean["delta"], (D,), with a ratio for each of `step.layers`."""
        x_D, round_ = state["params"], state["round"] + 1
        m_D = self.beta1 * state["m"] - (1 - self.beta1) * mean["delta"]
        v_D = self.beta2 * state["v"] + (1 - self.beta2) * mean["delta"] ** 2
        corrected_D = (v_D / (1 - self.beta2**round_)) ** 0.5
        u_D = m_D / (1 - self.beta1**round_) / (corrected_D + self.epsilon) + self.weight_decay * x_D
        ratio_D = trust_ratio(x_D, u_D, step.layers)
        return {"params": x_D - self.server_lr * step.lr_scale * ratio_D * u_D, "m": m_D, "v": v_D, "round": round_}
