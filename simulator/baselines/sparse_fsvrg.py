"""Sparse FSVRG: FSVRG with its scaling of coordinates, which a device cannot know and a study can.

Konečný, McMahan, Ramage, Richtárik, "Federated optimization: distributed machine learning for on-device intelligence",
2016, Algorithm 4.

    all clients     send ∇F_k(w), whose mean is ∇F(w)
    on client k     w_k starts at w; for each example j, in random order
                    w_k −= lr / n_k · (S_k (∇f_j(w_k) − ∇f_j(w)) + ∇F(w))
    on the server   w += A Σ n_k/n · (w_k − w)

    S_k = diag(φ^d / φ_k^d)     φ^d, φ_k^d: the share of examples with feature d, of all and of client k's
    A = diag(K / ω^d)           ω^d: the number of clients with feature d in an example

Without the scaling, S_k = A = 1, this is the algorithm `fsvrg` on all clients. Where a client, or every client, lacks
a feature its factor is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcore.algorithms.settings import flag, nonnegative, positive
from simulator.baselines import LinearBaseline
from simulator.baselines.linear import Array, LinearProblem
from simulator.baselines.method import Order

Visits = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SparseFsvrg:
    """Two exchanges a round: d up and d down for each, and the frequencies of features once. State: the weights (D, C).

    l2: weight of the regularisation, a part of the problem.
    lr: step size h; a step on a client with n_k examples is h / n_k.
    scaled: whether coordinates are scaled by S_k and A.
    """

    name: ClassVar[LinearBaseline] = "sparse_fsvrg"

    l2: float = nonnegative(1e-3)
    lr: float = positive(1.0)
    scaled: bool = flag(True)

    def init(self, problem: LinearProblem) -> Array:
        return np.zeros((problem.features.shape[1], problem.targets.shape[1]))

    def weights(self, problem: LinearProblem, state: Array) -> Array:
        return state

    def step(self, problem: LinearProblem, state: Array, order: Order) -> Array:
        common_DC, moved_DC = problem.gradient(state), np.zeros_like(state)
        present_ND = problem.features != 0
        share_D = present_ND.mean(0)
        clients_D = np.zeros(len(share_D))
        for client, rows in enumerate(problem.rows):
            own_D = present_ND[rows].mean(0)
            clients_D += own_D > 0
            scale_D = np.divide(share_D, own_D, out=np.ones_like(own_D), where=(own_D > 0) & self.scaled)
            visits = order(client, 0, rows.stop - rows.start)
            after_DC = self._sweep(problem, rows, state, common_DC, scale_D[:, None], visits)
            moved_DC += (rows.stop - rows.start) / len(problem.features) * (after_DC - state)
        rarity_D = np.divide(
            len(problem.rows), clients_D, out=np.ones_like(share_D), where=(clients_D > 0) & self.scaled
        )
        moved_DC *= rarity_D[:, None]
        return state + moved_DC

    def _sweep(
        self, problem: LinearProblem, rows: slice, start_DC: Array, common_DC: Array, scale_D1: Array, visits: Visits
    ) -> Array:
        """w_k of a client, (D, C), after a step on each of its examples."""
        x, y = problem.features[rows], problem.targets[rows]
        before_NC = problem.slopes(x @ start_DC, y)
        after_DC, h = start_DC.copy(), self.lr / len(x)
        for j in visits:
            change_C = problem.slopes(x[j] @ after_DC, y[j]) - before_NC[j]
            change_DC = x[j][:, None] * change_C + problem.l2 * (after_DC - start_DC)
            after_DC -= h * (scale_D1 * change_DC + common_DC)
        return after_DC
