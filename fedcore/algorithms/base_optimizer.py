"""Base optimizers of Mime and MimeLite: U, the step of an optimizer with its state s held fixed, and V, the move of s.

The equations and the paper are in `mime.py`. m starts at 0, v at `initial_v`. Trap: devices divide by √v before any
gradient was seen, so v must start above 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedcore.algorithms.algorithm import Broadcast, State, Vector

OptimizerName = Literal["momentum", "adam", "adagrad", "sgd"]


@dataclass(frozen=True, slots=True)
class BaseOptimizer:
    """One of the optimizers, with β₁, β₂, ε and the start of v."""

    name: OptimizerName
    beta1: float
    beta2: float
    epsilon: float
    initial_v: float

    def start(self, params_D: Vector) -> State:
        """s before the first round."""
        zeros_D = 0.0 * params_D
        state = {"m": zeros_D, "v": zeros_D + self.initial_v}
        return {name: vector for name, vector in state.items() if name in self._vectors}

    def direction(self, gradient_D: Vector, s: Broadcast) -> Vector:
        """U(g, s)."""
        u_D = self.beta1 * s["m"] + (1 - self.beta1) * gradient_D if "m" in self._vectors else gradient_D
        return u_D / (s["v"] ** 0.5 + self.epsilon) if "v" in self._vectors else u_D

    def move(self, gradient_D: Vector, s: State) -> State:
        """V(c, s)."""
        moved = {}
        if "m" in self._vectors:
            moved["m"] = self.beta1 * s["m"] + (1 - self.beta1) * gradient_D
        if self.name == "adam":
            moved["v"] = self.beta2 * s["v"] + (1 - self.beta2) * gradient_D**2
        if self.name == "adagrad":
            moved["v"] = s["v"] + gradient_D**2
        return moved

    @property
    def _vectors(self) -> str:
        return {"sgd": "", "momentum": "m", "adam": "mv", "adagrad": "v"}[self.name]
