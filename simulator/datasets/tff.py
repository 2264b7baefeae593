"""Data sets that TensorFlow Federated publishes, in its files: HDF5, and newer SQLite, with its examples.

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
from simulator.columns import int64_of
from simulator.datasets.bundled import CHARACTERS, tokens, windows
from simulator.errors import DatasetError
from simulator.population import Array, Population, draw

# Examples in TensorFlow's serialisation, the protobuf message tf.train.Example, read without TensorFlow.
#
# An example maps names to features, and a feature is a list of bytes, floats or integers, as
# tensorflow/core/example/example.proto and feature.proto describe it.

DTYPES = {"bytes_list": np.object_, "float_list": np.float32, "int64_list": np.int64}


def fields_of(example: bytes) -> dict[str, Array]:
    """The fields of an example: bytes, float32 or int64, (values,). Raises ValueError for a malformed one."""
    from google.protobuf.message import DecodeError

    try:
        features = example_class().FromString(example).features.feature
    except DecodeError as error:
        raise ValueError(f"no tf.train.Example: {error}") from error
    return {
        name: np.array(getattr(feature, kind).value, DTYPES[kind])
        for name, feature in features.items()
        if (kind := feature.WhichOneof("kind"))
    }


_PROTO = """
    name: "muster/example.proto" package: "tensorflow" syntax: "proto3"
    message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
    message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
    message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
    message_type {
      name: "Feature" oneof_decl { name: "kind" }
      field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" oneof_index: 0 }
      field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" oneof_index: 0 }
      field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" oneof_index: 0 }
    }
    message_type {
      name: "Features"
      field { name: "feature" number: 1 type_name: ".tensorflow.Features.FeatureEntry" label: LABEL_REPEATED }
      nested_type {
        name: "FeatureEntry" options { map_entry: true }
        field { name: "key" number: 1 type: TYPE_STRING }
        field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.Feature" }
      }
    }
    message_type { name: "Example" field { name: "features" number: 1 type_name: ".tensorflow.Features" } }
"""


@functools.cache
def example_class() -> Any:
    """The class of messages tf.train.Example."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


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
    for split, client, read in _readers(folder, files):
        readers.setdefault(client if files.shared else f"{split}/{client}", []).append(read)
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


def _readers(folder: Path, files: Files) -> Iterator[tuple[str, str, Callable[[], Fields]]]:
    """The name of each split, with each of its clients and what reads the client's fields."""
    database = folder / files.sqlite
    if database.is_file():
        query = "SELECT client_id FROM client_metadata WHERE split_name = ?"
        for split in files.splits:
            for (client,) in _rows(database, query, split):
                yield split, client, functools.partial(_from_sqlite, database, split, files.fields, client)
        return
    paths = [folder / name for name in files.hdf5 if (folder / name).is_file()]
    if not paths:
        raise DatasetError(f"{folder} holds neither {files.sqlite} nor {' or '.join(files.hdf5)}")
    for path in paths:
        for client in _in_hdf5(path, list):
            yield path.stem, client, functools.partial(_from_hdf5, path, files.fields, client)


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


# Federated data sets that TensorFlow Federated publishes, in its layout (simulator/datasets/tff.py).
#
# Each is read whole, or the given number of clients is drawn. Their fields become those of the built-in models. Further
# preprocessing of the papers is left out: crops and standardisation of images of CIFAR-100, and limits to the examples
# of a client.

WORDS, SENTENCE = 10_000, 20
"""Of Stack Overflow: the size of the vocabulary, and the predicted tokens of a sentence."""


def federated_emnist(data: Path, clients: int | None = None) -> Population:
    """3,400 writers of 62 characters. `x` float32 (1, 28, 28), where 1 is paper; `y` int64."""
    files = Files(
        ("fed_emnist_train.h5", "fed_emnist_test.h5"),
        "emnist_all.sqlite",
        ("all_train", "all_test"),
        ("pixels", "label"),
    )

    def convert(raw: Fields) -> Fields:
        return {"x": raw["pixels"].reshape(-1, 1, 28, 28).astype(np.float32), "y": _labels(raw["label"])}

    return read_clients(data / "federated_emnist", files, convert, 62, clients)


def cifar100(data: Path, clients: int | None = None) -> Population:
    """600 clients of 100 images by pachinko allocation. `x` float32 (3, 32, 32) in 0 … 1; `y`, `coarse` int64."""
    files = Files(
        ("fed_cifar100_train.h5", "fed_cifar100_test.h5"),
        "cifar100.sqlite",
        ("train", "test"),
        ("image", "label", "coarse_label"),
        shared=False,
    )

    def convert(raw: Fields) -> Fields:
        x = raw["image"].reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).astype(np.float32) / 255
        return {"x": np.ascontiguousarray(x), "y": _labels(raw["label"]), "coarse": _labels(raw["coarse_label"])}

    return read_clients(data / "cifar100", files, convert, 100, clients)


def tff_shakespeare(data: Path, clients: int | None = None) -> Population:
    """715 roles of all plays. `x` and `y` int64 (80,): characters, and the ones that follow, as in `shakespeare`."""
    files = Files(
        ("shakespeare_train.h5", "shakespeare_test.h5"), "shakespeare.sqlite", ("train", "test"), ("snippets",)
    )

    def convert(raw: Fields) -> Fields:
        return dict(windows(tokens(_texts(raw["snippets"]))))

    return read_clients(data / "tff_shakespeare", files, convert, len(CHARACTERS) + 4, clients)


def stackoverflow(data: Path, clients: int | None) -> Population:
    """Users of Stack Overflow, of which there are 381,235. `x` and `y` int64 (20,): words, and the ones that follow.

    An example is a sentence between a token for its start and one for its end, cut to 21 tokens. Words are numbered by
    `stackoverflow.word_count`: 0 is padding, then WORDS words, unknown, start, end.
    """
    folder = data / "stackoverflow"
    files = Files(
        ("stackoverflow_train.h5", "stackoverflow_held_out.h5", "stackoverflow_test.h5"),
        "stackoverflow.sqlite",
        ("train", "heldout", "test"),
        ("tokens",),
    )
    vocabulary = _vocabulary(folder / "stackoverflow.word_count")
    unknown, start, end = (WORDS + place for place in (1, 2, 3))

    def convert(raw: Fields) -> Fields:
        padded = np.zeros((len(raw["tokens"]), SENTENCE + 1), np.int64)
        for row, text in zip(padded, _texts(raw["tokens"]), strict=True):
            sentence = [start, *(vocabulary.get(word, unknown) for word in text.split()), end][: SENTENCE + 1]
            row[: len(sentence)] = sentence
        return {"x": padded[:, :-1].copy(), "y": padded[:, 1:].copy()}

    return read_clients(folder, files, convert, WORDS + 4, clients)


def _vocabulary(path: Path) -> dict[str, int]:
    """The most frequent words and their tokens. Every line of the file has a word and its number of users."""
    if not path.is_file():
        raise DatasetError(f"{path} does not exist; it is published beside the data set, and numbers its words")
    words = [line.split()[0] for line in path.read_text("utf-8").splitlines()[:WORDS] if line.strip()]
    return {word: token for token, word in enumerate(words, start=1)}


def _labels(array: Array) -> Array:
    return int64_of(array.reshape(-1), "a label")


def _texts(array: Array) -> list[str]:
    return [text.decode("utf-8", "replace") for text in array.reshape(-1).tolist()]
