"""Populations made by chance: partitions of a data set among clients, and synthetic data sets.

Each is a frozen dataclass whose fields are its settings. `deal` gives, for every client, the rows of its examples;
every example goes to one client.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcore.algorithms.settings import count, parse, positive
from fedcore.errors import InvalidSetting
from fedcore.validation import offered
from simulator.errors import DatasetError
from simulator.population import Array, Population

Rows = NDArray[np.int64]


class Partition(Protocol):
    """A way of dealing examples. name: what a user calls it."""

    name: ClassVar[str]

    def deal(self, users: Population, clients: int, generator: Generator) -> list[Rows]:
        """The rows of every client's examples. Raises DatasetError when the data set lacks what is needed."""


@dataclass(frozen=True, slots=True)
class Dirichlet:
    """Each client draws its mix of classes from Dirichlet(alpha). All hold equally many examples, give or take one.

    Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual classification",
    2019. A smaller alpha is less IID.
    """

    name: ClassVar[str] = "dirichlet"

    alpha: float = positive(0.3)

    def deal(self, users: Population, clients: int, generator: Generator) -> list[Rows]:
        """The rows of a mix of classes for each client. Raises DatasetError without classes."""
        labels = _classes_of(users, users.labels)
        classes = int(labels.max()) + 1
        pools = _pools(labels, classes, generator)
        shards = []
        for size in _equal_sizes(labels.size, clients):
            wanted = generator.dirichlet(np.full(classes, self.alpha))
            shards.append([pools[_drawn(wanted, [len(pool) for pool in pools], generator)].pop() for _ in range(size)])
        return [np.array(sorted(shard), np.int64) for shard in shards]


@dataclass(frozen=True, slots=True)
class Pachinko:
    """Each client draws its mix of coarse classes from Dirichlet(alpha), and within each one of classes from beta.

    The pachinko allocation of Reddi et al., "Adaptive federated optimization", ICLR 2021, appendix F. Needs the field
    `coarse` beside `y`. All clients hold the same number of examples, give or take one.
    """

    name: ClassVar[str] = "pachinko"

    alpha: float = positive(0.1)
    beta: float = positive(10.0)

    def deal(self, users: Population, clients: int, generator: Generator) -> list[Rows]:
        """The rows of a mix of coarse classes for each client. Raises DatasetError without them."""
        labels, coarse = _classes_of(users, users.labels), _classes_of(users, users.fields.get("coarse"), "coarse")
        pools = _pools(labels, int(labels.max()) + 1, generator)
        groups = [[pools[label] for label in np.unique(labels[coarse == parent])] for parent in np.unique(coarse)]
        shards = []
        for size in _equal_sizes(labels.size, clients):
            wanted = generator.dirichlet(np.full(len(groups), self.alpha))
            within = [generator.dirichlet(np.full(len(group), self.beta)) for group in groups]
            shard = []
            for _ in range(size):
                chosen = _drawn(wanted, [sum(map(len, group)) for group in groups], generator)
                group = groups[chosen]
                shard.append(group[_drawn(within[chosen], [len(pool) for pool in group], generator)].pop())
            shards.append(np.array(sorted(shard), np.int64))
        return shards


@dataclass(frozen=True, slots=True)
class Shards:
    """Each client holds a few shards of the examples, sorted by class, and so only a few classes.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017, section 3.
    """

    name: ClassVar[str] = "shards"

    per_client: int = count(2)

    def deal(self, users: Population, clients: int, generator: Generator) -> list[Rows]:
        """The rows of some shards for each client. Raises DatasetError without classes, or with too few examples."""
        labels = _classes_of(users, users.labels)
        if clients * self.per_client > labels.size:
            raise DatasetError(f"{labels.size} examples cannot be cut into {clients * self.per_client} shards")
        shards = np.array_split(np.argsort(labels, kind="stable"), clients * self.per_client)
        dealt = generator.permutation(len(shards)).reshape(clients, self.per_client)
        return [np.sort(np.concatenate([shards[index] for index in indices])) for indices in dealt]


@dataclass(frozen=True, slots=True)
class Quantity:
    """Shares of the examples are drawn from Dirichlet(beta), at least one example each; classes are mixed equally.

    Li, Diao, Chen, He, "Federated learning on non-IID data silos: an experimental study", ICDE 2022, section IV.
    """

    name: ClassVar[str] = "quantity"

    beta: float = positive(0.5)

    def deal(self, users: Population, clients: int, generator: Generator) -> list[Rows]:
        """Rows drawn at random for each client, of different numbers."""
        examples = int(users.starts[-1])
        shares = generator.dirichlet(np.full(clients, self.beta))
        sizes = 1 + generator.multinomial(examples - clients, shares)
        return np.split(generator.permutation(examples), np.cumsum(sizes)[:-1])


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Each client gets as many examples as a user has, drawn from all users: sizes stay, identity is lost.

    The comparison with the partition by user in Wang et al., "A field guide to federated optimization", 2021.
    """

    name: ClassVar[str] = "shuffled"

    def deal(self, users: Population, clients: int, generator: Generator) -> list[Rows]:
        """Rows drawn at random for each client, as many as a user has. Raises DatasetError where there are no users."""
        if len(users) == 1:
            raise DatasetError("shuffled keeps the sizes of users, and this data set has no users: take dirichlet")
        if clients != len(users):
            raise DatasetError(f"shuffled keeps the number of users, {len(users)}: leave clients out")
        return np.split(generator.permutation(int(users.starts[-1])), users.starts[1:-1])


@dataclass(frozen=True, slots=True)
class Linear:
    """Client k of K holds a share of the examples in proportion to k; classes are mixed equally."""

    name: ClassVar[str] = "linear"

    def deal(self, users: Population, clients: int, generator: Generator) -> list[Rows]:
        """Rows drawn at random for each client, of different numbers."""
        return _shared(users, np.arange(1.0, clients + 1), generator)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Shares of the examples grow by a factor from client to client, to `ratio` times the first; classes are mixed."""

    name: ClassVar[str] = "exponential"

    ratio: float = positive(100.0)

    def deal(self, users: Population, clients: int, generator: Generator) -> list[Rows]:
        """Rows drawn at random for each client, of different numbers."""
        return _shared(users, np.geomspace(1, self.ratio, clients), generator)


def _shared(users: Population, weights: NDArray[np.float64], generator: Generator) -> list[Rows]:
    """All rows, in random order, cut in proportion to weights; at least one each."""
    examples, clients = int(users.starts[-1]), len(weights)
    ends = np.rint(np.cumsum(weights / weights.sum()) * (examples - clients)).astype(np.int64)
    return np.split(generator.permutation(examples), (ends + np.arange(1, clients + 1))[:-1])


KINDS: tuple[type[Partition], ...] = (Dirichlet, Pachinko, Shards, Quantity, Linear, Exponential, Shuffled)
NATURAL = "natural"
"""The partition of a data set that has users, by user: none."""
PARTITIONS: dict[str, type[Partition]] = {kind.name: kind for kind in KINDS} | {"pathological": Shards}


def read_partition(text: str) -> Partition:
    """The partition of a text such as `dirichlet:0.3` or `pachinko:0.1,10`. Raises DatasetError."""
    name, _, numbers = text.partition(":")
    if name not in PARTITIONS:
        raise DatasetError(f"no partition is called {name!r}; {offered(name, (NATURAL, *PARTITIONS))}")
    kind = PARTITIONS[name]
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values = numbers.split(",") if numbers else []
    if len(values) > len(fields):
        raise DatasetError(f"partition {text!r}: {name} takes {', '.join(fields) or 'no numbers'}")
    try:
        read: Partition = parse(kind, dict(zip(fields, values, strict=False)))
    except InvalidSetting as error:
        raise DatasetError(f"partition {text!r}: {error}") from error
    return read


def dealt(users: Population, partition: str, clients: int, seed: int = 0) -> Population:
    """The examples of all users, dealt to `clients` by the partition that the text names.

    The same seed and number of clients give the same partition. Raises DatasetError when there are too few examples, or
    they lack the classes that the partition uses.
    """
    kind, examples = read_partition(partition), int(users.starts[-1])
    if not 1 <= clients <= examples:
        raise DatasetError(f"{examples} examples cannot be split over {clients} clients")
    shards = kind.deal(users, clients, np.random.Generator(np.random.Philox(key=[seed, clients])))
    return users.of_rows([f"{kind.name}-{index:03d}" for index in range(clients)], shards)


def _classes_of(users: Population, array: Array | None, field: str = "y") -> Rows:
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        raise DatasetError(
            f"this partition goes by the class of an example, an integer in field {field!r}; there is "
            f"none among {sorted(users.fields)}"
        )
    return array.astype(np.int64)


def _equal_sizes(examples: int, clients: int) -> list[int]:
    return [examples // clients + (client < examples % clients) for client in range(clients)]


def _pools(labels: Rows, classes: int, generator: Generator) -> list[list[int]]:
    """The rows of every class, in random order."""
    return [generator.permutation(np.flatnonzero(labels == label)).tolist() for label in range(classes)]


def _drawn(wanted: NDArray[np.float64], left: list[int], generator: Generator) -> int:
    """An index, drawn by the weights `wanted` among those with something left; their proportions stay."""
    weights = np.where(np.array(left) > 0, wanted + 1e-12, 0)
    # The draw of `generator.choice`, to the bit, without its checks of the weights, which take half of the time.
    shares = (weights / weights.sum()).cumsum()
    return int((shares / shares[-1]).searchsorted(generator.random(), side="right"))


# Synthetic data sets: synthetic(α, β), quadratics, and a sparse logistic problem.
#
# Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks" (FedProx), MLSys 2020,
# section 5.1 and appendix C.1. Client k draws, for 60 features and 10 classes,
#
#     u_k ~ N(0, α)     W_k, b_k ~ N(u_k, 1)     y = argmax(W_k x + b_k)
#     B_k ~ N(0, β)     v_k ~ N(B_k, 1)          x ~ N(v_k, Σ),  Σ diagonal with Σ_jj = j^−1.2
#
# and holds 50 examples and a log-normal(4, 2) number of further ones: few clients have most examples. As in the paper's
# released code, α and β are standard deviations, which matters only if they are neither 0 nor 1, and the argmax is not
# sampled.


FEATURES, CLASSES = 60, 10
FEWEST, LOG_MEAN, LOG_DEVIATION = 50, 4.0, 2.0
MOST = 5_000
"""The most examples of a client: the paper's distribution is unbounded."""


def synthetic(clients: int = 30, alpha: float = 1.0, beta: float = 1.0, seed: int = 0) -> Population:
    """`x` float32 (60,), `y` int64 below 10. Raises DatasetError when a number is out of range."""
    if clients < 1 or alpha < 0 or beta < 0:
        raise DatasetError(f"synthetic has 1 client or more, and α and β from 0, not {clients}, {alpha} and {beta}")
    generator = np.random.Generator(np.random.Philox(key=[seed, clients]))
    deviation = np.arange(1, FEATURES + 1) ** -0.6
    shards = []
    for _ in range(clients):
        size = min(MOST, FEWEST + int(generator.lognormal(LOG_MEAN, LOG_DEVIATION)))
        centre = generator.normal(0, alpha)
        weights = generator.normal(centre, 1, (CLASSES, FEATURES))
        bias = generator.normal(centre, 1, CLASSES)
        means = generator.normal(generator.normal(0, beta), 1, FEATURES)
        x = generator.normal(means, deviation, (size, FEATURES))
        shards.append({"x": x.astype(np.float32), "y": (x @ weights.T + bias).argmax(1).astype(np.int64)})
    return Population.of([f"synthetic-{index:03d}" for index in range(clients)], shards)


# Quadratics: clients whose losses are quadratic functions, for the model `least_squares`.
#
#     F_i(x) = ½ (x − o_i)ᵀ H_i (x − o_i)      H_i = diag(h_i1, …, h_iD)      F = mean over clients of F_i
#
# The minimum of F is x* = (1, …, 1) / √D. There the gradients of the clients differ by G, the dissimilarity of
# Karimireddy et al., "SCAFFOLD", ICML 2020, assumption A1: G² = 1/N Σ_i ‖∇F_i(x*)‖². The Hessian of F has eigenvalues
# from 1 down to 1 / condition, and the clients' own differ from it, coordinate by coordinate.
#
# A client has D examples: example j is √(D h_ij) e_j, with the label that makes o_i the client's own minimum. So a
# gradient on all of them is ∇F_i, without noise; smaller batches are noisy. Every F_i(o_i) is 0, so F(x*) is not. Trap:
# with equal Hessians FedAvg has no drift, even if G is large.

CURVATURE_SPREAD = 0.5
"""The most by which a client's curvature differs from the mean of all clients, relatively."""


def quadratics(
    clients: int = 20, dissimilarity: float = 1.0, condition: float = 10.0, dimensions: int = 16, seed: int = 0
) -> Population:
    """Clients of equal size. `x` float32 (dimensions,), `y` float32.

    Raises DatasetError when there are fewer than two clients, or a number is out of range.
    """
    if clients < 2 or dimensions < 1:
        raise DatasetError(f"quadratics need two clients and a dimension, not {clients} and {dimensions}")
    if dissimilarity < 0 or condition < 1:
        raise DatasetError(
            f"the dissimilarity of quadratics is 0 or more and their condition 1 or more, not {dissimilarity} and "
            f"{condition}"
        )
    generator = np.random.Generator(np.random.Philox(key=[seed, clients]))
    slopes_ND = _centred(generator.standard_normal((clients, dimensions)))
    slopes_ND *= dissimilarity / np.sqrt((slopes_ND**2).sum(1).mean())
    spread_ND = _centred(generator.uniform(-1, 1, (clients, dimensions)))
    spread_ND *= CURVATURE_SPREAD / np.abs(spread_ND).max()
    curvatures_ND = np.geomspace(1, 1 / condition, dimensions) * (1 + spread_ND)
    minima_ND = minimum(dimensions) - slopes_ND / curvatures_ND
    shards = [
        {"x": np.diag(scales_D).astype(np.float32), "y": (scales_D * minimum_D).astype(np.float32)}
        for scales_D, minimum_D in zip(np.sqrt(dimensions * curvatures_ND), minima_ND, strict=True)
    ]
    return Population.of([f"quadratic-{index:03d}" for index in range(clients)], shards)


def minimum(dimensions: int) -> NDArray[np.float64]:
    """x*, the minimum of the mean loss over clients: (dimensions,), of length 1."""
    return np.full(dimensions, dimensions**-0.5)


def _centred(values_ND: NDArray[np.float64]) -> NDArray[np.float64]:
    centred: NDArray[np.float64] = values_ND - values_ND.mean(0)
    return centred


# A sparse logistic problem with the structure of Konečný et al.: many users with few examples and favourite words.
#
# Konečný, McMahan, Ramage, Richtárik, "Federated optimization: distributed machine learning for on-device
# intelligence", 2016, section 4. They predict from the words of a public post whether it gets a comment: 10,000 authors
# with 75 to 9,000 posts each, 20,000 words. Those posts are not public. This generator has the properties that they
# call important:
#
# * users hold unequally many examples (log-normal numbers);
# * features are sparse and binary, and their frequencies follow a power law (Zipf);
# * users differ: each belongs to a cluster with favourite words, and has further favourites, so that few users use most
#   words;
# * the rate of positive labels differs from user to user.
#
# Examples are dense arrays with a constant 1 as their last feature, so use at most some thousands of features.

CLUSTERS = 10
WORDS, SPARSE_FEWEST, SPARSE_LOG_MEAN, SPARSE_LOG_DEVIATION, SPARSE_MOST = 12, 10, 3.0, 1.0, 400
CLUSTER_SHAPE, USER_SHAPE = 0.3, 0.3
"""Shapes of the gamma distributions that favour words; a smaller one makes users differ more."""
USER_BIAS, WORD_WEIGHT = 1.0, 1.0
"""Standard deviations of a user's own inclination to positive labels, and of the true weight of a word."""


def sparse_logistic(users: int = 200, features: int = 1000, seed: int = 0) -> Population:
    """`x` float32 (features,) of zeros and ones, `y` int64, 0 or 1.

    Raises DatasetError when there is no user, or there are no more features than words in an example.
    """
    if users < 1 or features <= 2 * WORDS:
        raise DatasetError(
            f"a sparse logistic problem has users and more than {2 * WORDS} features, not {users} and {features}"
        )
    generator = np.random.Generator(np.random.Philox(key=[seed, users]))
    words = features - 1
    frequencies = 1 / np.arange(1, words + 1)
    favoured_CW = generator.gamma(CLUSTER_SHAPE, size=(CLUSTERS, words))
    weights = generator.normal(0, WORD_WEIGHT, words)
    shards = []
    for user in range(users):
        size = min(SPARSE_MOST, SPARSE_FEWEST + int(generator.lognormal(SPARSE_LOG_MEAN, SPARSE_LOG_DEVIATION)))
        taste = frequencies * favoured_CW[user % CLUSTERS] * generator.gamma(USER_SHAPE, size=words)
        x = _examples(generator, size, taste)
        odds = x @ weights + generator.normal(0, USER_BIAS)
        y = generator.random(size) < 1 / (1 + np.exp(-odds))
        constant = np.ones((size, 1), np.float32)
        shards.append({"x": np.hstack([x, constant]), "y": y.astype(np.int64)})
    return Population.of([f"author-{user:04d}" for user in range(users)], shards)


def _examples(generator: Generator, size: int, taste: NDArray[np.float64]) -> NDArray[np.float32]:
    """The words in each example: float32 (size, words) of zeros and ones."""
    words = generator.choice(len(taste), (size, WORDS), p=taste / taste.sum())
    x = np.zeros((size, len(taste)), np.float32)
    np.put_along_axis(x, words, 1, axis=1)
    return x
