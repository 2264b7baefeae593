"""Distributed optimizers of linear models, by name, as baselines of studies: CoCoA+, DANE and sparse FSVRG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcore.algorithms.settings import count, flag, nonnegative, positive
from fedcore.batching import StreamKey, permutation
from simulator.configuration import LinearBaseline
from simulator.errors import DatasetError, Diverged
from simulator.population import Population
from simulator.training import Facts, PerUser, Tensors, Vectors, check_shapes, digest_of

# Linear problems with ℓ2 regularisation over clients: ridge regression and logistic regression, in float64.
#
#     F(W) = 1/n Σ_j φ(Wᵀ x_j, y_j) + l2/2 ‖W‖²        F_k the same over the n_k examples of client k
#
#     ridge       φ(a, y) = ½ ‖a − y‖²
#     logistic    φ(a, y) = Σ log(1 + exp(−y a)), one term for each output, y = ±1
#
# Classes become one output each, +1 where it is the class and −1 elsewhere. The outputs are problems of their own that
# are solved side by side. Features get a constant 1 at the end, which is regularised as the others.
#
# Shapes: N examples, D features, C outputs, K clients.

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """The examples of all clients, client after client: client k holds rows `starts[k]` to `starts[k + 1]`.

    loss: one of `simulator.configuration.LOSSES`. features: (N, D). targets: (N, C). l2: weight of the regularisation.
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


Order = Callable[[int, int, int], NDArray[np.int64]]
"""order(client, epoch, examples): the order in which a client visits its examples in this round, (examples,)."""


class Method(Protocol):
    """A distributed optimizer: pure functions, its settings as fields. All clients take part in every round."""

    name: ClassVar[LinearBaseline]

    @property
    def l2(self) -> float:
        """Weight of the regularisation."""

    def init(self, problem: LinearProblem) -> Array:
        """The state before round 1."""

    def step(self, problem: LinearProblem, state: Array, order: Order) -> Array:
        """The state after one round more."""

    def weights(self, problem: LinearProblem, state: Array) -> Array:
        """The weights (D, C) that a state stands for."""


class LinearTraining:
    """A linear model, trained by a method on the training users and measured by the held-out ones.

    loss: "ridge" or "logistic". The users' examples are arrays `x`, of any shape, and classes `y`; DatasetError is
    raised for others.
    """

    def __init__(self, loss: str, method: Method, train: Population, test: Population, *, seed: int) -> None:
        if not {"x", "y"} <= train.fields.keys() or train.classes is None:
            raise DatasetError(f"a linear model reads `x` and classes `y`; the data set has {sorted(train.fields)}")
        self.test = test
        self._method, self._classes, self._seed = method, train.classes, seed
        features, targets = _examples(train, train.classes)
        self._problem = LinearProblem(loss, features, targets, train.starts, method.l2)
        self._state = method.init(self._problem)
        size = features.shape[1] * train.classes
        settings = asdict(method)  # type: ignore[call-overload]
        self.facts = Facts(method.name, settings, len(train), len(train), size)

    def run_round(self, number: int) -> dict[str, float]:
        def order(client: int, epoch: int, examples: int) -> NDArray[np.int64]:
            return permutation(StreamKey(self._seed, number, client), 0, epoch, examples)

        self._state = self._method.step(self._problem, self._state, order)
        loss = self._problem.value(self._weights)
        if not np.isfinite(loss):
            raise Diverged(
                f"round {number}: {self._method.name} diverged; a higher l2, or mu where there is one, helps"
            )
        return {"train.loss": loss, "examples": len(self._problem.features)}

    def measure(self, number: int) -> PerUser:
        features, targets = _examples(self.test, self._classes)
        outputs = features @ self._weights
        values = {
            "loss": self._problem.losses(outputs, targets).sum(1),
            "accuracy": (outputs.argmax(1) == self.test.fields["y"]).astype(np.float64),
        }
        starts, sizes = self.test.starts[:-1], self.test.sizes
        return {name: np.add.reduceat(each, starts) / sizes for name, each in values.items()}

    def vectors(self) -> Vectors:
        return {"state": self._state.copy()}

    def restore(self, vectors: Mapping[str, NDArray[np.floating]]) -> None:
        check_shapes(vectors, self.vectors())
        self._state = vectors["state"].astype(np.float64)

    def tensors(self) -> Tensors:
        """None: a linear model is no torch model."""
        return {}

    def digest(self) -> str:
        return digest_of([self._weights])

    @property
    def _weights(self) -> Array:
        return self._method.weights(self._problem, self._state)


def _examples(users: Population, classes: int) -> tuple[Array, Array]:
    """Features with a constant 1 at the end, and ±1 for every class."""
    x = users.fields["x"].reshape(len(users.fields["x"]), -1).astype(np.float64)
    targets = np.where(users.fields["y"][:, None] == np.arange(classes), 1.0, -1.0)
    return np.hstack([x, np.ones((len(x), 1))]), targets


# CoCoA+: every client ascends the dual of its own part of the problem, and all steps are added.
#
# Ma, Smith, Jaggi, Jordan, Richtárik, Takáč, "Adding vs. averaging in distributed primal-dual optimization", ICML 2015,
# Algorithm 1 with γ = 1 and σ' = K, the local problem by dual coordinate ascent (the paper's LocalSDCA).
#
# With a dual α_j for every example and w = 1/(l2 · n) Σ_j α_j x_j, the dual of F is
#
#     D(α) = 1/n Σ_j −φ*(−α_j) − l2/2 ‖w‖²
#
#     on client k     v starts at w; for each example j, in random order
#                     α_j += the δ that is best for  −φ*(−α_j − δ) − δ ⟨x_j, v⟩ − σ' ‖x_j‖² / (2 · l2 · n) · δ²
#                     v += σ' / (l2 · n) · δ x_j
#     on the server   w += 1/(l2 · n) Σ_j δ_j x_j over all clients
#
#     ridge           δ = (y_j − α_j − ⟨x_j, v⟩) / (1 + σ' ‖x_j‖² / (l2 · n))
#     logistic        α_j = y_j β, where β in (0, 1) is the root of
#                     log β/(1 − β) + y_j ⟨x_j, v⟩ + σ' ‖x_j‖² / (l2 · n) · (β − β_old)
#
# Traps: the duals stay on the clients, so that this is no algorithm for devices. Steps are added, not averaged, which
# is safe because σ' = K in the local problem bounds what the clients do to each other.

HALVINGS = 50


class _OfWeights:
    """A method whose state is the weights (D, C), which start at 0."""

    __slots__ = ()

    def init(self, problem: LinearProblem) -> Array:
        return np.zeros((problem.features.shape[1], problem.targets.shape[1]))

    def weights(self, problem: LinearProblem, state: Array) -> Array:
        return state


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


# DANE: every client solves a problem of its own that is bent towards the common gradient, exactly.
#
# Shamir, Srebro, Zhang, "Communication-efficient distributed optimization using an approximate Newton-type method",
# ICML 2014, Figure 1.
#
#     all clients     send ∇F_k(w), whose mean is ∇F(w)
#     on client k     w_k = argmin F_k(v) − ⟨∇F_k(w) − eta · ∇F(w), v⟩ + mu/2 · ‖v − w‖²
#     on the server   w = Σ n_k/n · w_k
#
# The paper has equally many examples on every client; the mean is weighted by them here, so that F is that of all
# examples. Trap: with mu = 0 it may diverge where clients differ; mu about as large as their Hessians differ is enough.

NEWTON_STEPS, ACCURACY = 100, 1e-14


@dataclass(frozen=True, slots=True)
class Dane(_OfWeights):
    """Two exchanges a round: d up and d down for each. State: the weights (D, C).

    l2: weight of the regularisation, a part of the problem.
    eta: weight of the common gradient; 1 in the paper's experiments.
    mu: weight of the quadratic term.
    """

    name: ClassVar[LinearBaseline] = "dane"

    l2: float = positive(1e-3)
    eta: float = positive(1.0)
    mu: float = nonnegative(1.0)

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


# Sparse FSVRG: FSVRG with its scaling of coordinates, which a device cannot know and a study can.
#
# Konečný, McMahan, Ramage, Richtárik, "Federated optimization: distributed machine learning for on-device
# intelligence", 2016, Algorithm 4.
#
#     all clients     send ∇F_k(w), whose mean is ∇F(w)
#     on client k     w_k starts at w; for each example j, in random order
#                     w_k −= lr / n_k · (S_k (∇f_j(w_k) − ∇f_j(w)) + ∇F(w))
#     on the server   w += A Σ n_k/n · (w_k − w)
#
#     S_k = diag(φ^d / φ_k^d)     φ^d, φ_k^d: the share of examples with feature d, of all and of client k's
#     A = diag(K / ω^d)           ω^d: the number of clients with feature d in an example
#
# Without the scaling, S_k = A = 1, this is the algorithm `fsvrg` on all clients. Where a client, or every client, lacks
# a feature its factor is 1.

Visits = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SparseFsvrg(_OfWeights):
    """Two exchanges a round: d up and d down for each, and the frequencies of features once. State: the weights (D, C).

    l2: weight of the regularisation, a part of the problem.
    lr: step size h; a step on a client with n_k examples is h / n_k.
    scaled: whether coordinates are scaled by S_k and A.
    """

    name: ClassVar[LinearBaseline] = "sparse_fsvrg"

    l2: float = nonnegative(1e-3)
    lr: float = positive(1.0)
    scaled: bool = flag(True)

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


METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (Dane, CocoaPlus, SparseFsvrg)}
