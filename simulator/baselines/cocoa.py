"""CoCoA+: every client ascends the dual of its own part of the problem, and all steps are added.

Ma, Smith, Jaggi, Jordan, Richtárik, Takáč, "Adding vs. averaging in distributed primal-dual optimization", ICML 2015,
Algorithm 1 with γ = 1 and σ' = K, the local problem by dual coordinate ascent (the paper's LocalSDCA).

With a dual α_j for every example and w = 1/(l2 · n) Σ_j α_j x_j, the dual of F is

    D(α) = 1/n Σ_j −φ*(−α_j) − l2/2 ‖w‖²

    on client k     v starts at w; for each example j, in random order
                    α_j += the δ that is best for  −φ*(−α_j − δ) − δ ⟨x_j, v⟩ − σ' ‖x_j‖² / (2 · l2 · n) · δ²
                    v += σ' / (l2 · n) · δ x_j
    on the server   w += 1/(l2 · n) Σ_j δ_j x_j over all clients

    ridge           δ = (y_j − α_j − ⟨x_j, v⟩) / (1 + σ' ‖x_j‖² / (l2 · n))
    logistic        α_j = y_j β, where β in (0, 1) is the root of
                    log β/(1 − β) + y_j ⟨x_j, v⟩ + σ' ‖x_j‖² / (l2 · n) · (β − β_old)

Traps: the duals stay on the clients, so that this is no algorithm for devices. Steps are added, not averaged, which is
safe because σ' = K in the local problem bounds what the clients do to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcore.algorithms.settings import count, positive
from simulator.baselines import LinearBaseline
from simulator.baselines.linear import Array, LinearProblem, sigmoid
from simulator.baselines.method import Order

HALVINGS = 50


@dataclass(frozen=True, slots=True)
class CocoaPlus:
    """One exchange a round: d up, d down. State: the duals of all examples (N, C).

    l2: weight of the regularisation, a part of the problem.
    epochs: sweeps of a client over its examples in a round.
    """

    name: ClassVar[LinearBaseline] = "cocoa"

    l2: float = positive(1e-3)
    epochs: int = count(1)

    def init(self, problem: LinearProblem) -> Array:
        """Duals at which the dual is finite: 0, or for logistic problems ½ y."""
        zeros_NC = np.zeros_like(problem.targets)
        return zeros_NC if problem.loss == "ridge" else zeros_NC + problem.targets / 2

    def weights(self, problem: LinearProblem, state: Array) -> Array:
        return problem.features.T @ state / (problem.l2 * len(state))

    def step(self, problem: LinearProblem, state: Array, order: Order) -> Array:
        """The duals after a round of all clients, each from the same w."""
        after_NC, weights_DC = state.copy(), self.weights(problem, state)
        for client, rows in enumerate(problem.rows):
            self._ascend(problem, rows, after_NC[rows], weights_DC.copy(), client, order)
        return after_NC

    def _ascend(
        self, problem: LinearProblem, rows: slice, duals_NC: Array, v_DC: Array, client: int, order: Order
    ) -> None:
        """Move a client's duals, in place."""
        x, y = problem.features[rows], problem.targets[rows]
        scale = len(problem.rows) / (problem.l2 * len(problem.features))
        for epoch in range(self.epochs):
            for j in order(client, epoch, len(x)):
                curvature = scale * x[j] @ x[j]
                best_C = _best(problem, duals_NC[j], y[j], x[j] @ v_DC, curvature)
                v_DC += scale * np.outer(x[j], best_C - duals_NC[j])
                duals_NC[j] = best_C


def _best(problem: LinearProblem, dual_C: Array, y_C: Array, output_C: Array, curvature: float) -> Array:
    """The best next dual of one example, (C,)."""
    if problem.loss == "ridge":
        return dual_C + (y_C - dual_C - output_C) / (1 + curvature)
    # With β = sigmoid(u), u + y⟨x, v⟩ + curvature (sigmoid(u) − β_old) rises in u, and its root lies in this bracket.
    margin_C, old_C = y_C * output_C, y_C * dual_C
    low_C, high_C = -margin_C - curvature * (1 - old_C), -margin_C + curvature * old_C
    for _ in range(HALVINGS):
        middle_C = (low_C + high_C) / 2
        below_C = middle_C + margin_C + curvature * (sigmoid(middle_C) - old_C) < 0
        low_C, high_C = np.where(below_C, middle_C, low_C), np.where(below_C, high_C, middle_C)
    return y_C * sigmoid((low_C + high_C) / 2)
