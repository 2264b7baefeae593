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
from simulator.datasets.shakespeare import shakespeare
from simulator.datasets.wisdm import wisdm
from simulator.errors import DatasetError
from simulator.population import Population

# The share of users that training never sees.
HELD_OUT = 0.2


@dataclass(frozen=True, slots=True)
class Dataset:
    """How a data set is loaded.

    `bundled` needs no folder; `partitioned` has no users of its own, so any number of clients can be made.
    """

    load: Callable[..., Population]
    bundled: bool = False
    partitioned: bool = False


DATASETS = {
    "digits": Dataset(digits, bundled=True, partitioned=True),
    "wisdm": Dataset(wisdm),
    "omniglot": Dataset(omniglot),
    "shakespeare": Dataset(shakespeare),
    "mnist_10k": Dataset(mnist_10k, partitioned=True),
}


def describe(name: str) -> Dataset:
    """The data set called `name`. Raises DatasetError when there is none."""
    if name not in DATASETS:
        raise DatasetError(f"no data set is called {name!r}; {offered(name, DATASETS)}")
    return DATASETS[name]


def load(name: str, data: Path | None = None, clients: int | None = None) -> Population:
    """The population of a data set; `data` is the folder that holds data sets on disk.

    clients: over how many clients a partitioned data set is split; ignored by data sets with real users.
    Raises DatasetError when the name is unknown, or the folder or file is missing or malformed.
    """
    dataset = describe(name)
    sizes = {"clients": clients} if clients is not None and dataset.partitioned else {}
    if dataset.bundled:
        return dataset.load(**sizes)
    if data is None:
        raise DatasetError(f"data set {name!r} lies on disk: say where with --data DIR (the folder that holds {name}/)")
    return dataset.load(data, **sizes)


def users(name: str, data: Path | None, count: int) -> tuple[Population, Population]:
    """`count` training users of a data set, and its held-out users; a partitioned one is split to have as many.

    Where there are fewer users, some have several devices: their examples are dealt out. Raises DatasetError when there
    are too few examples for that.
    """
    train, held_out = load(name, data, math.ceil(count / (1 - HELD_OUT))).split(HELD_OUT, seed=0)
    return train.spread(count) if len(train) < count else train.subset(range(count)), held_out
