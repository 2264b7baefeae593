"""Linear problems with ℓ2 regularisation over clients: ridge regression and logistic regression, in float64.

    F(W) = 1/n Σ_j φ(Wᵀ x_j, y_j) + l2/2 ‖W‖²        F_k the same over the n_k examples of client k

    ridge       φ(a, y) = ½ ‖a − y‖²
    logistic    φ(a, y) = Σ log(1 + exp(−y a)), one term for each output, y = ±1

Classes become one output each, +1 where it is the class and −1 elsewhere. The outputs are problems of their own that
are solved side by side. Features get a constant 1 at the end, which is regularised as the others.

Shapes: N examples, D features, C outputs, K clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """The examples of all clients, client after client: client k holds rows `starts[k]` to `starts[k + 1]`.

    loss: one of `simulator.baselines.LOSSES`. features: (N, D). targets: (N, C). l2: weight of the regularisation.
    """

    loss: str
    features: Array
    targets: Array
    starts: NDArray[np.int64]
    l2: float

    @property
    def rows(self) -> list[slice]:
        """The rows of every client."""
        return [slice(start, end) for start, end in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def losses(self, outputs: Array, targets: Array) -> Array:
        """φ, one term for each output."""
        if self.loss == "ridge":
            return 0.5 * (outputs - targets) ** 2
        return np.logaddexp(0, -targets * outputs)

    def slopes(self, outputs: Array, targets: Array) -> Array:
        """φ', by output."""
        return outputs - targets if self.loss == "ridge" else -targets * sigmoid(-targets * outputs)

    def curvatures(self, outputs: Array) -> Array:
        """φ'', by output."""
        return np.ones_like(outputs) if self.loss == "ridge" else sigmoid(outputs) * sigmoid(-outputs)

    def value(self, weights_DC: Array) -> float:
        """F(W)."""
        losses_NC = self.losses(self.features @ weights_DC, self.targets)
        return float(losses_NC.sum() / len(losses_NC) + self.l2 / 2 * (weights_DC**2).sum())

    def gradient(self, weights_DC: Array, rows: slice = slice(None)) -> Array:
        """∇F(W), or ∇F_k(W) for the rows of client k: (D, C)."""
        x, y = self.features[rows], self.targets[rows]
        return x.T @ self.slopes(x @ weights_DC, y) / len(x) + self.l2 * weights_DC

    def hessian(self, weights_D: Array, rows: slice) -> Array:
        """∇²F_k for one output: (D, D)."""
        x = self.features[rows]
        curved = x * self.curvatures(x @ weights_D)[:, None]
        return x.T @ curved / len(x) + self.l2 * np.eye(x.shape[1])


def sigmoid(values: Array) -> Array:
    """1 / (1 + exp(−values)), without overflow."""
    return np.exp(-np.logaddexp(0, -values))
