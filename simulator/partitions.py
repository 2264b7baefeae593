"""Partitions: ways of dealing the examples of a data set to clients, by name, as in `dirichlet:0.3`.

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

from fedcore.algorithms.algorithm import count, parse, positive
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


PARTITIONS: dict[str, type[Partition]] = {kind.name: kind for kind in (Dirichlet, Pachinko, Shards, Quantity, Shuffled)}


def read_partition(text: str) -> Partition:
    """The partition of a text such as `dirichlet:0.3` or `pachinko:0.1,10`. Raises DatasetError."""
    name, _, numbers = text.partition(":")
    if name not in PARTITIONS:
        raise DatasetError(f"no partition is called {name!r}; {offered(name, PARTITIONS)}")
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
