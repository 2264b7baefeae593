"""DANE: every client solves a problem of its own that is bent towards the common gradient, exactly.

Shamir, Srebro, Zhang, "Communication-efficient distributed optimization using an approximate Newton-type method", ICML
2014, Figure 1.

    all clients     send ∇F_k(w), whose mean is ∇F(w)
    on client k     w_k = argmin F_k(v) − ⟨∇F_k(w) − eta · ∇F(w), v⟩ + mu/2 · ‖v − w‖²
    on the server   w = Σ n_k/n · w_k

The paper has equally many examples on every client; the mean is weighted by them here, so that F is that of all
examples. Trap: with mu = 0 it may diverge where clients differ; mu about as large as their Hessians differ is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcore.algorithms.settings import nonnegative, positive
from simulator.baselines import LinearBaseline
from simulator.baselines.linear import Array, LinearProblem
from simulator.baselines.method import Order

NEWTON_STEPS, ACCURACY = 100, 1e-14


@dataclass(frozen=True, slots=True)
class Dane:
    """Two exchanges a round: d up and d down for each. State: the weights (D, C).

    l2: weight of the regularisation, a part of the problem.
    eta: weight of the common gradient; 1 in the paper's experiments.
    mu: weight of the quadratic term.
    """

    name: ClassVar[LinearBaseline] = "dane"

    l2: float = positive(1e-3)
    eta: float = positive(1.0)
    mu: float = nonnegative(1.0)

    def init(self, problem: LinearProblem) -> Array:
        return np.zeros((problem.features.shape[1], problem.targets.shape[1]))

    def weights(self, problem: LinearProblem, state: Array) -> Array:
        return state

    def step(self, problem: LinearProblem, state: Array, order: Order) -> Array:
        common_DC = problem.gradient(state)
        after_DC = np.zeros_like(state)
        for rows in problem.rows:
            share = (rows.stop - rows.start) / len(problem.features)
            bend_DC = problem.gradient(state, rows) - self.eta * common_DC
            local = [self._solve(problem, rows, output, state, bend_DC) for output in range(state.shape[1])]
            after_DC += share * np.stack(local, 1)
        return after_DC

    def _solve(self, problem: LinearProblem, rows: slice, output: int, start_DC: Array, bend_DC: Array) -> Array:
        """w_k of one output, (D,), by Newton's method with backtracking from w."""
        x, y = problem.features[rows], problem.targets[rows, output]
        w, bend = start_DC[:, output], bend_DC[:, output]

        def value(v: Array) -> float:
            fit = problem.losses(x @ v, y).mean() + problem.l2 / 2 * v @ v
            return float(fit - bend @ v + self.mu / 2 * (v - w) @ (v - w))

        v = w
        for _ in range(NEWTON_STEPS):
            slope = x.T @ problem.slopes(x @ v, y) / len(x) + problem.l2 * v - bend + self.mu * (v - w)
            newton = np.linalg.solve(problem.hessian(v, rows) + self.mu * np.eye(len(v)), slope)
            decrement, size = float(slope @ newton), 1.0
            if decrement < ACCURACY:
                return v - newton
            while size > ACCURACY and value(v - size * newton) > value(v) - size / 4 * decrement:
                size /= 2
            v = v - size * newton
        return v
