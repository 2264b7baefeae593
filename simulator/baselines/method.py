"""Linear problems over clients, and the contract of the distributed optimizers that solve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcore.batching import StreamKey, permutation
from simulator.baselines import LinearBaseline
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
