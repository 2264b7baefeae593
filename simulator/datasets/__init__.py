"""Data sets by name, as populations of clients. Formats: docs/datasets.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedcore.names import offered
from simulator.datasets.digits import digits
from simulator.datasets.mnist_10k import mnist_10k
from simulator.datasets.omniglot import omniglot
from simulator.datasets.own import own
from simulator.datasets.quadratics import quadratics
from simulator.datasets.shakespeare import shakespeare
from simulator.datasets.sparse_logistic import sparse_logistic
from simulator.datasets.svmlight import svmlight
from simulator.datasets.synthetic import synthetic
from simulator.datasets.wisdm import wisdm
from simulator.errors import DatasetError
from simulator.partitions import dealt
from simulator.population import Population

# The share of users that training never sees.
HELD_OUT = 0.2


@dataclass(frozen=True, slots=True)
class Dataset:
    """How a data set is loaded, and what it is, in a few words.

    on_disk: whether `load` takes the folder that holds data sets on disk. clients: how many clients a data set has by
    default that has no users of its own: it is partitioned. `load` takes their number where they are `generated`.
    """

    load: Callable[..., Population]
    about: str
    on_disk: bool = True
    clients: int | None = None
    generated: bool = False


DATASETS = {
    "digits": Dataset(digits, "handwritten digits of 8×8 pixels, bundled", on_disk=False, clients=75),
    "wisdm": Dataset(wisdm, "activities of phone users from accelerometers"),
    "omniglot": Dataset(omniglot, "characters of five alphabets by writer, 28×28 pixels"),
    "shakespeare": Dataset(shakespeare, "characters of plays by speaking role, the next one to be predicted"),
    "mnist_10k": Dataset(mnist_10k, "handwritten digits of 28×28 pixels", clients=125),
    "svmlight": Dataset(svmlight, "your examples with sparse features and two classes, a file for each user"),
    "synthetic": Dataset(
        synthetic,
        "synthetic(1, 1) of FedProx: 10 classes by a model of each client's own",
        on_disk=False,
        clients=30,
        generated=True,
    ),
    "quadratics": Dataset(
        quadratics,
        "clients with quadratic losses, for the model least_squares",
        on_disk=False,
        clients=20,
        generated=True,
    ),
    "sparse_logistic": Dataset(
        sparse_logistic,
        "sparse features and two classes, as words of an author",
        on_disk=False,
        clients=200,
        generated=True,
    ),
}
PARTITION = "dirichlet:0.3"
"""How a data set without users is dealt to clients by default."""


def load(name: str, data: Path | None = None, clients: int | None = None, partition: str | None = None) -> Population:
    """The population of a data set; `data` is the folder that holds data sets on disk.

    name: one of DATASETS, or `package.module:function`, which returns a population, or a path to files with users'
    examples (simulator/datasets/user_files.py).
    partition: how the examples are dealt to clients, as `dirichlet:0.3` (simulator/partitions.py); None leaves them
    with the users that have them, and is PARTITION where there are none. clients: to how many; by default as many as
    there are users.
    Raises DatasetError when the name is unknown, the folder or file is missing or malformed, or the data set cannot be
    dealt out like that.
    """
    default = default_clients(name)
    count = default if clients is None else clients
    if name in DATASETS and DATASETS[name].generated and partition is None:
        return DATASETS[name].load(count)
    found = _read(name, data)
    if partition is None and default is None:
        if clients is not None:
            raise DatasetError(
                f"data set {name!r} has {len(found)} users; to deal their examples to {clients} clients, say how, "
                f"as with --partition {PARTITION}"
            )
        return found
    return dealt(found, partition or PARTITION, len(found) if count is None else count)


def default_clients(name: str) -> int | None:
    """How many clients a data set has by default that any number can be made of; None for one with users."""
    return DATASETS[name].clients if name in DATASETS else None


def _read(name: str, data: Path | None) -> Population:
    if name not in DATASETS:
        found = own(name)
        if found is None:
            raise DatasetError(
                f"no data set is called {name!r}; {offered(name, DATASETS)}, or give your own as "
                "package.module:function, or as a path to npz or Parquet files"
            )
        return found
    dataset = DATASETS[name]
    if not dataset.on_disk:
        return dataset.load()
    if data is None:
        raise DatasetError(f"data set {name!r} lies on disk: say where with --data DIR (the folder that holds {name}/)")
    return dataset.load(data)


def users(name: str, data: Path | None, count: int) -> tuple[Population, Population]:
    """`count` training users of a data set, and its held-out users; a partitioned one is split to have as many.

    Where there are fewer users, some have several devices: their examples are dealt out. Raises DatasetError when there
    are too few examples for that.
    """
    clients = None if default_clients(name) is None else math.ceil(count / (1 - HELD_OUT))
    train, held_out = load(name, data, clients).split(HELD_OUT, seed=0)
    return train.spread(count) if len(train) < count else train.subset(range(count)), held_out
