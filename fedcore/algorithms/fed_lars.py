"""FedLARS: server momentum whose step in every layer is scaled to the size of the layer's weights.

Charles, Garrett, Huo, Shmulyian, Smith, "On large-cohort training for federated learning", NeurIPS 2021. The server
optimizer is LARS as You et al. write it, "Large batch optimization for deep learning: training BERT in 76 minutes",
ICLR 2020, Algorithm 1, and as the code of Charles et al. has it, with its ε.

    on the phone    local training from the received x
    on the server   m ← β m + (1 − β) (g + λ x)      g = −mean(y_i − x)
                    x −= server_lr · r · m           in every layer, r = ‖x‖ / (‖m‖ + ε), or 1 if either norm is 0

A layer is a tensor of the model. Traps: the norms are those of single layers, never of the whole vector. This scales
the momentum. The first LARS (You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017) scales the
gradient, by η ‖x‖ / (‖g‖ + λ ‖x‖), before it enters an undamped momentum: another algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedcore.algorithms.algorithm import Report, ServerStep, State, Vector
from fedcore.algorithms.local_training import LocalTraining
from fedcore.algorithms.settings import fraction, nonnegative, positive


@dataclass(frozen=True, slots=True)
class FedLARS(LocalTraining):
    """Down: d. Up: d. Server state: the model and m, 2d.

    server_lr: step size of the server, relative to the size of a layer.
    momentum: β above.
    weight_decay: λ above.
    epsilon: ε above.
    weighting: the paper weighs by "examples".
    """

    name: ClassVar[str] = "fedlars"
    family: ClassVar[str] = "server optimizer"

    server_lr: float = positive(0.03)
    momentum: float = fraction(0.9)
    weight_decay: float = nonnegative(0.0)
    epsilon: float = positive(1e-3)

    def init(self, params_D: Vector) -> State:
        return {"params": params_D, "m": 0.0 * params_D}

    def update(self, state: State, mean: Report, step: ServerStep = ServerStep()) -> State:
        """One step of LARS on −Δ, Δ = mean["delta"], (D,), with a ratio for each of `step.layers`."""
        x_D = state["params"]
        m_D = self.momentum * state["m"] + (1 - self.momentum) * (self.weight_decay * x_D - mean["delta"])
        ratio_D = trust_ratio(x_D, m_D, step.layers, self.epsilon)
        return {"params": x_D - self.server_lr * step.lr_scale * ratio_D * m_D, "m": m_D}


def trust_ratio(x_D: Vector, u_D: Vector, layers: tuple[slice, ...], epsilon: float = 0.0) -> Vector:
    """‖x‖ / (‖u‖ + epsilon) of its layer at every place (D,), and 1 in a layer where either norm is 0."""
    ratio_D = 0.0 * x_D
    for layer in layers:
        norm_x, norm_u = (((part_D[..., layer] ** 2).sum(-1) ** 0.5)[..., None] for part_D in (x_D, u_D))
        both = (norm_x > 0) * (norm_u > 0)
        ratio_D[..., layer] = both * norm_x / (norm_u + epsilon + (both == 0)) + (both == 0)
    return ratio_D
