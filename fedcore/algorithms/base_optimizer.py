"""Base optimizers of Mime and MimeLite: U, the step of an optimizer with its state s held fixed, and V, the move of s.

The equations and the paper are in `mime.py`. m starts at 0, v at `initial_v`. Trap: devices divide by √v before any
gradient was seen, so v must start above 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcore.algorithms.algorithm import Broadcast, State, Vector
from fedcore.algorithms.settings import choice, count, fraction, positive
from fedcore.schedule import Loop, Weighting


@dataclass(frozen=True, slots=True)
class BaseOptimizer:
    """The settings of an algorithm whose devices take steps of a base optimizer, and that optimizer.

    client_lr: step size η of local steps; use about 0.001 to 0.01 with adam and adagrad.
    server_lr: step size on the mean delta; 1 in the paper.
    beta1, beta2, epsilon: β₁, β₂, ε of the base optimizer.
    initial_v: where v of adam and adagrad starts; above 0, because devices divide by √v before any gradient was seen.
    epochs, batch_size: local sweeps and batch size.
    weighting: the paper is "uniform"; "examples" weighs a device by its number of examples.
    """

    family: ClassVar[str] = "mime"

    optimizer: Literal["momentum", "adam", "adagrad", "sgd"] = choice("momentum", "adam", "adagrad", "sgd")
    client_lr: float = positive(0.1)
    server_lr: float = positive(1.0)
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.99)
    epsilon: float = positive(1e-3)
    initial_v: float = positive(1e-4)
    epochs: int = count(1)
    batch_size: int = count(20)
    weighting: Weighting = choice("uniform", "examples")

    @property
    def loop(self) -> Loop:
        """Of the local steps."""
        return Loop(batch_size=self.batch_size, epochs=self.epochs)

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
        if self.optimizer == "adam":
            moved["v"] = self.beta2 * s["v"] + (1 - self.beta2) * gradient_D**2
        if self.optimizer == "adagrad":
            moved["v"] = s["v"] + gradient_D**2
        return moved

    @property
    def _vectors(self) -> str:
        return {"sgd": "", "momentum": "m", "adam": "mv", "adagrad": "v"}[self.optimizer]
