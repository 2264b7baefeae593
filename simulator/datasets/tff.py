"""Data sets in the files of TensorFlow Federated: HDF5, and newer SQLite, with the examples of clients.

    HDF5     examples/<client>/<field>, an array of all examples of the client; one file for each split
    SQLite   examples(split_name, client_id, serialized_example_proto), client_metadata(client_id, split_name,
             num_examples); an example is a tf.train.Example, which has lists of bytes, floats or integers by field

They are read as by tff.simulation.datasets (emnist.py, cifar100.py, shakespeare.py, stackoverflow.py). A client in
several splits gets the examples of all, in their order, because users are held out here, not examples.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from export.errors import reason
from simulator.datasets.tf_example import fields_of
from simulator.errors import DatasetError
from simulator.population import Array, Population, draw

Fields = dict[str, Array]
"""The examples of a client by field: numbers (n, …), or bytes (n,)."""


@dataclass(frozen=True, slots=True)
class Files:
    """The names of a data set's files, either kind of which is enough, and of the fields to read.

    hdf5: a file for each split. sqlite: one file for all splits, with these names of splits. fields: names of fields.
    shared: whether clients with the same name in several splits are one client.
    """

    hdf5: tuple[str, ...]
    sqlite: str
    splits: tuple[str, ...]
    fields: tuple[str, ...]
    shared: bool = True


def read_clients(
    folder: Path, files: Files, convert: Callable[[Fields], Fields], classes: int, most: int | None = None
) -> Population:
    """The clients of the files that are in the folder, in the order of their names.

    convert: turns a client's fields into a model's. classes: labels or tokens are below this. most: the number of
    clients to draw from all. Raises DatasetError, naming the file.
    """
    readers: dict[str, list[Callable[[], Fields]]] = {}
    for split in _splits(folder, files):
        for client in split.clients:
            name = client if files.shared else f"{split.name}/{client}"
            readers.setdefault(name, []).append(functools.partial(split.read, client))
    if not readers:
        raise DatasetError(f"{folder} holds no clients in {', '.join(files.splits)}")
    names = sorted(readers)
    if most is not None and most < len(names):
        names = [names[index] for index in sorted(draw(len(names), most, seed=0))]
    shards = []
    for name in names:
        parts = [read() for read in readers[name]]
        try:
            shards.append(convert({field: np.concatenate([part[field] for part in parts]) for field in files.fields}))
        except DatasetError as error:
            raise DatasetError(f"{folder}: client {name!r}: {error}") from error
        except ValueError as error:  # shapes that cannot be
            raise DatasetError(f"{folder}: client {name!r}: {reason(error)}") from error
    return Population.of(names, shards, classes)


@dataclass(frozen=True, slots=True)
class _Split:
    """A split: its name, its clients, and a function that reads one of them."""

    name: str
    clients: Sequence[str]
    read: Callable[[str], Fields]


def _splits(folder: Path, files: Files) -> Iterator[_Split]:
    database = folder / files.sqlite
    if database.is_file():
        query = "SELECT client_id FROM client_metadata WHERE split_name = ?"
        for split in files.splits:
            clients = [row[0] for row in _rows(database, query, split)]
            yield _Split(split, clients, functools.partial(_from_sqlite, database, split, files.fields))
        return
    paths = [folder / name for name in files.hdf5 if (folder / name).is_file()]
    if not paths:
        raise DatasetError(f"{folder} holds neither {files.sqlite} nor {' or '.join(files.hdf5)}")
    for path in paths:
        yield _Split(path.stem, _in_hdf5(path, list), functools.partial(_from_hdf5, path, files.fields))


def _in_hdf5(path: Path, look: Callable[[Any], Any]) -> Any:
    """The result of `look` on the group `examples`. Raises DatasetError."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            return look(file["examples"])
    except (KeyError, OSError) as error:
        raise DatasetError(f"{path} is not in TFF's layout, examples/<client>/<field>: {reason(error)}") from error


def _from_hdf5(path: Path, fields: Sequence[str], client: str) -> Fields:
    values: Fields = _in_hdf5(path, lambda group: {field: group[client][field][()] for field in fields})
    return values


def _from_sqlite(database: Path, split: str, fields: Sequence[str], client: str) -> Fields:
    query = "SELECT serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? ORDER BY rowid"
    try:
        examples = [fields_of(row[0]) for row in _rows(database, query, split, client)]
        return {field: np.stack([example[field] for example in examples]) for field in fields}
    except (KeyError, ValueError) as error:
        raise DatasetError(
            f"{database}: the examples of client {client!r} in {split} are not in TFF's layout: {reason(error)}"
        ) from error


def _rows(database: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()
    except sqlite3.DatabaseError as error:
        raise DatasetError(
            f"{database} is not in TFF's layout, with examples and client_metadata: {reason(error)}"
        ) from error
