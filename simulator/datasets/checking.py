"""A check of a folder of data sets: whether each one's files are there, whole, and what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedcore.names import offered
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
