"""Data sets by name, as populations of clients, and the check of a folder of them. Formats: docs/datasets.md."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from export.errors import reason
from fedcore.validation import offered
from simulator.configuration import EVERY_COLUMN, HELD_OUT, Columns
from simulator.datasets import bundled
from simulator.datasets.partitions import NATURAL, dealt, quadratics, sparse_logistic, synthetic
from simulator.datasets.tff import cifar100, federated_emnist, stackoverflow, tff_shakespeare
from simulator.datasets.user_files import is_own, leaf_femnist, leaf_shakespeare, own, svmlight
from simulator.errors import DatasetError
from simulator.population import Population, draw


@dataclass(frozen=True, slots=True)
class Dataset:
    """The loader of a data set, and a description in a few words.

    folder: the name of its folder on disk, by default its own. on_disk: whether `load` takes the folder that holds data
    sets on disk. sized: whether it also takes the number of clients to make or draw. clients: the default number of
    clients of a data set that has no users, or is not read whole. If such a data set is not sized, `load` gives
    examples without users, which are partitioned.
    """

    load: Callable[..., Population]
    about: str
    on_disk: bool = True
    clients: int | None = None
    sized: bool = False
    folder: str = ""


def _generated(load: Callable[..., Population], about: str, clients: int) -> Dataset:
    return Dataset(load, f"{about}, generated", on_disk=False, clients=clients, sized=True)


DATASETS = {
    "digits": Dataset(bundled.digits, "handwritten digits of 8×8 pixels, bundled", on_disk=False, clients=75),
    "wisdm": Dataset(bundled.wisdm, "activities of phone users, from accelerometers"),
    "omniglot": Dataset(bundled.omniglot, "characters of five alphabets by writer, 28×28 pixels"),
    "shakespeare": Dataset(bundled.shakespeare, "next characters of plays by speaking role"),
    "shakespeare_marks": Dataset(
        bundled.shakespeare_marks,
        "sentences of plays by speaking role, for the mark that ends each",
        folder="shakespeare",
    ),
    "mnist_10k": Dataset(bundled.mnist_10k, "handwritten digits of 28×28 pixels", clients=125),
    "svmlight": Dataset(svmlight, "your own sparse features and two classes, a file for each user"),
    "federated_emnist": Dataset(
        federated_emnist, "characters by writer, 28×28 pixels, as TFF publishes them", sized=True
    ),
    "cifar100": Dataset(
        cifar100, "images of 32×32 pixels and 100 classes by pachinko allocation, as of TFF", sized=True
    ),
    "tff_shakespeare": Dataset(tff_shakespeare, "next characters of all plays by speaking role, as of TFF", sized=True),
    "stackoverflow": Dataset(
        stackoverflow, "next words of sentences by user of Stack Overflow, as of TFF", clients=1000, sized=True
    ),
    "leaf_femnist": Dataset(leaf_femnist, "characters by writer, 28×28 pixels, as LEAF makes them"),
    "leaf_shakespeare": Dataset(leaf_shakespeare, "next characters of all plays by speaking role, as of LEAF"),
    "synthetic": _generated(synthetic, "synthetic(1, 1) of FedProx: 10 classes, a model for each client", 30),
    "quadratics": _generated(quadratics, "quadratic losses, for the model least_squares", 20),
    "sparse_logistic": _generated(sparse_logistic, "sparse features and two classes, as of an author's words", 200),
}
PARTITION = "dirichlet:0.3"
"""The default partition of a data set without users."""


def describe(name: str, columns: Columns = EVERY_COLUMN) -> Dataset:
    """The data set of that name, or a user's own. Raises DatasetError when there is none.

    name: one of DATASETS, or `package.module:function`, which returns a population, or a path to files with users'
    examples, whose `columns` have a meaning (simulator/datasets/tables.py).
    """
    if name in DATASETS:
        if columns != EVERY_COLUMN:
            raise DatasetError(f"data set {name} has its fields; leave the columns of your own tables out")
        return DATASETS[name]
    if is_own(name):
        return Dataset(functools.partial(own, name, columns), "your own", on_disk=False)
    raise DatasetError(
        f"no data set is called {name!r}; {offered(name, DATASETS)}, or give your own as package.module:function, "
        "file.py:function or as a path to npz, CSV or Parquet files"
    )


def folder_of(name: str) -> str:
    """The name of the folder on disk that a data set of DATASETS is read from; two may be read from one."""
    return DATASETS[name].folder or name


def load(
    name: str,
    data: Path | str | None = None,
    clients: int | None = None,
    partition: str | None = None,
    columns: Columns = EVERY_COLUMN,
) -> Population:
    """The population of a data set; `data` is the folder that holds data sets on disk.

    name, columns: as `describe` takes them.
    partition: the division of examples among clients, such as `dirichlet:0.3` (partitions.py). None keeps the data
    set's users, or means PARTITION if it has none. clients: the number of clients, by default that of the users;
    without a partition, the number of users to draw at random.
    Raises DatasetError when the name is unknown, the folder or file is missing or malformed, a number is not finite, a
    label is below 0, or the data set cannot be partitioned so.
    """
    dataset = describe(name, columns)
    if clients is not None and clients < 1:
        raise DatasetError(f"clients must be at least 1, not {clients}")
    anonymous = dataset.clients is not None and not dataset.sized
    if partition == NATURAL and anonymous:
        raise DatasetError(f"{NATURAL} is by user, and data set {name!r} has none; take {PARTITION}")
    partition = None if partition == NATURAL else partition
    count = dataset.clients if clients is None else clients
    arguments: list[Path | int | None] = []
    if dataset.on_disk:
        folder = folder_of(name)
        if data is None:
            words = f"data set {name!r} lies on disk: say where with --data=DIR (the folder that holds {folder}/)"
            raise DatasetError(f"{words}; {_get(name)}")
        if not Path(data, folder).is_dir():
            words = f"{data} holds no folder {folder}; name the folder that holds {folder}/ with --data"
            raise DatasetError(f"{words}; {_get(name)}")
        arguments.append(Path(data))
    if dataset.sized:
        arguments.append(count if partition is None else dataset.clients)
    population = _loaded(name, dataset, arguments)
    if partition is not None or anonymous:
        return dealt(population, partition or PARTITION, len(population) if count is None else count)
    if clients is None or clients == len(population):
        return population
    if clients > len(population):
        raise DatasetError(
            f"data set {name!r} has {len(population)} users; to deal their examples to {clients} clients, say how, "
            f"as with --partition={PARTITION}"
        )
    return population.subset(sorted(draw(len(population), clients, seed=0)))


def load_examples(name: str, data: Path, clients: int | None) -> Population:
    """The population of a data set on disk as it is, or some clients of one that is `sized`. Raises DatasetError."""
    dataset = describe(name)
    return _loaded(name, dataset, [data] if clients is None else [data, clients])


def _get(name: str) -> str:
    return f"`muster data show {name}` says where it comes from"


def _loaded(name: str, dataset: Dataset, arguments: Sequence[Path | int | None]) -> Population:
    """What a data set's `load` gives, verified. Whatever a malformed file makes it raise becomes a DatasetError."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then is refused by name
            return bundled.verified(dataset.load(*arguments), name)
    except ModuleNotFoundError:  # of an extra that is not installed
        raise
    except DatasetError as error:
        if dataset.on_disk and bundled.SOURCES[folder_of(name)].missing(Path(str(arguments[0]), folder_of(name))):
            raise DatasetError(f"{error}; {_get(name)}") from error
        raise
    except Exception as error:
        where = f" in {arguments[0]}" if dataset.on_disk else ""
        raise DatasetError(f"data set {name!r}{where} cannot be read: {reason(error)}") from error


def users(name: str, data: Path | None, count: int) -> tuple[Population, Population]:
    """`count` training users of a data set, and its held-out users. A data set without users is partitioned to match.

    If there are fewer users, the examples of some are divided among several devices. Raises DatasetError when there are
    too few examples for that.
    """
    clients = None if describe(name).clients is None else math.ceil(count / (1 - HELD_OUT))
    train, held_out = load(name, data, clients).split(HELD_OUT, seed=0)
    return train.spread(count) if len(train) < count else train.subset(range(count)), held_out


# A check of a folder of data sets, and facts about a population.


FEW = 20
"""Clients that are read of a data set which is too large to be read whole for a look."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding on a data set, JSON-ready. A note need not be wrong."""

    dataset: str
    status: Literal["ok", "note", "wrong"]
    what: str


def check_folder(folder: Path) -> list[Finding]:
    """What is found in a folder of data sets by their names, in that of one of them, or in one of your own files.

    Raises DatasetError for a folder that does not exist.
    """
    if not folder.is_dir():
        raise DatasetError(f"{folder} is no folder; name the one that holds data sets, or one of them")
    whole = folder.resolve()
    names = [name for name in bundled.SOURCES if (whole / name).is_dir()]
    if names:
        others = [path.name for path in sorted(whole.iterdir()) if path.is_dir() and path.name not in DATASETS]
        return [finding for name in names for finding in _checked(name, whole)] + [
            Finding(name, "note", f"no data set is called so; {offered(name, bundled.SOURCES)}") for name in others
        ]
    if whole.name in bundled.SOURCES:
        return list(_checked(whole.name, whole.parent))
    try:
        return [Finding(str(folder), "ok", _held(load(str(whole))))]
    except DatasetError as error:
        return [Finding(str(folder), "wrong", str(error))]


def _checked(name: str, data: Path) -> Iterator[Finding]:
    source, folder = bundled.SOURCES[name], data / name
    missing = source.missing(folder)
    if missing:
        yield Finding(name, "wrong", f"{folder} lacks {', '.join(missing)}; `muster data show {name}` says its source")
        return
    for file, digest in source.sha256.items():
        if hashlib.sha256((folder / file).read_bytes()).hexdigest() != digest:
            yield Finding(name, "note", f"{file} has other bytes than the file that this project's studies read")
    try:
        users = load_examples(name, data, FEW if DATASETS[name].sized else None)
    except (DatasetError, ModuleNotFoundError) as error:
        yield Finding(name, "wrong", str(error))
        return
    known = ("users", source.users, len(users)), ("examples", source.examples, int(users.sizes.sum()))
    differ = [f"{found:,} {what}, not {expected:,}" for what, expected, found in known if expected not in (None, found)]
    if differ:
        yield Finding(name, "wrong", f"it holds {' and '.join(differ)}")
    else:
        part = f"; at most {FEW} clients were read" if DATASETS[name].sized else ""
        yield Finding(name, "ok", _held(users, counted=DATASETS[name].clients is None) + part)


def _held(users: Population, *, counted: bool = True) -> str:
    """counted: whether it has users."""
    words = [f"{len(users):,} users"] if counted else []
    words += [f"{users.sizes.sum():,} examples", *(f"{name} {kind}" for name, kind in users.kinds.items())]
    return ", ".join(words if users.classes is None else [*words, f"{users.classes} classes"])


PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


@dataclass(frozen=True, slots=True)
class PopulationFacts:
    """The facts, JSON-ready.

    per_user: percentiles of the number of examples. fields: type and shape by name. labels: the number of examples of
    each class, or of occurrences of each token; empty without classes. classes_per_user: the mean number of classes of
    a user. class_names, dropped: as of the population.
    """

    users: int
    examples: int
    per_user: dict[str, int]
    fields: dict[str, str]
    classes: int | None
    labels: list[int]
    classes_per_user: float | None
    class_names: tuple[str, ...] = ()
    dropped: int = 0


def facts_of(users: Population) -> PopulationFacts:
    """The facts about a population."""
    labels, each = np.zeros(0, np.int64), None
    if users.classes is not None and (pairs := _owned_labels(users)) is not None:
        labels = np.bincount(pairs % users.classes, minlength=users.classes)
        each = len(np.unique(pairs)) / len(users)
    return PopulationFacts(
        users=len(users),
        examples=int(users.sizes.sum()),
        per_user={f"p{rank}": int(np.percentile(users.sizes, rank)) for rank in PERCENTILES},
        fields=users.kinds,
        classes=users.classes,
        labels=labels.tolist(),
        classes_per_user=each,
        class_names=users.class_names,
        dropped=users.dropped,
    )


def label_counts(users: Population) -> NDArray[np.int64] | None:
    """The number of each user's examples of each class: (users, classes); None if the labels are no classes.

    Of several labels, those that are 0 or ignored are not counted.
    """
    pairs = _owned_labels(users)
    if pairs is None or users.classes is None:
        return None
    return np.bincount(pairs, minlength=len(users) * users.classes).reshape(len(users), users.classes)


def _owned_labels(users: Population) -> NDArray[np.int64] | None:
    """For each label that counts: user · classes + class."""
    if users.classes is None or users.labels is None:
        return None
    labels = np.maximum(users.labels, 0).reshape(int(users.starts[-1]), -1).astype(np.int64)
    owners = np.repeat(np.arange(len(users)), users.sizes)[:, None]
    pairs: NDArray[np.int64] = owners * users.classes + labels
    # Of several labels 0 is padding, what has no label, or what is ignored.
    return pairs[labels > 0] if users.labels.ndim > 1 else pairs.ravel()
