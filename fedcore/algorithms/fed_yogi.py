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

from fedcore.algorithms.algorithm import Vector
from fedcore.algorithms.fed_adam import FedAdam
from fedcore.algorithms.settings import choice


@dataclass(frozen=True, slots=True)
class FedYogi(FedAdam):
    """Down: d. Up: d. Server state: the model and two moments, 3d.

    form: where v starts: at τ² in the "paper", at 0 in its "released" experiments.
    """

    name: ClassVar[str] = "fedyogi"

    form: Literal["paper", "released"] = choice("paper", "released")

    def second_moment(self, v_D: Vector, square_D: Vector) -> Vector:
        """Yogi's: v moves by the size of Δ², up or down."""
        signed_D = (v_D > square_D) * square_D - (v_D < square_D) * square_D
        return v_D - (1 - self.beta2) * signed_D
