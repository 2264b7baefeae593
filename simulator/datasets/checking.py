"""A check of a folder of data sets, and facts about a population."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedcore.validation import offered
from simulator.datasets import DATASETS, load, load_examples
from simulator.datasets.sources import SOURCES
from simulator.errors import DatasetError
from simulator.population import Population

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
    names = [name for name in SOURCES if (whole / name).is_dir()]
    if names:
        others = [path.name for path in sorted(whole.iterdir()) if path.is_dir() and path.name not in DATASETS]
        return [finding for name in names for finding in _checked(name, whole)] + [
            Finding(name, "note", f"no data set is called so; {offered(name, SOURCES)}") for name in others
        ]
    if whole.name in SOURCES:
        return list(_checked(whole.name, whole.parent))
    try:
        return [Finding(str(folder), "ok", _held(load(str(whole))))]
    except DatasetError as error:
        return [Finding(str(folder), "wrong", str(error))]


def _checked(name: str, data: Path) -> Iterator[Finding]:
    source, folder = SOURCES[name], data / name
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
    a user.
    """

    users: int
    examples: int
    per_user: dict[str, int]
    fields: dict[str, str]
    classes: int | None
    labels: list[int]
    classes_per_user: float | None


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
