"""Data sets in files of a layout: LEAF's JSON and svmlight, a user's own npz and Parquet, or a function.

An npz holds an array for each field, with an example in every row. A Parquet file holds a column for each field; a
vector or an image is a list, or lists of lists, of equal length. A field `user` names each example's user; without it a
file is one user, named after the file. Numbers become types that models read: float32, int64 or uint8; a text in each
row becomes bytes, as devices keep them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from export.errors import reason
from fedcore.errors import why
from fedcore.validation import UNDECODABLE, decoder, import_own
from simulator.columns import check_labels, float32_of, int64_of, names_of
from simulator.datasets.bundled import CHARACTERS, WINDOW, characters, read_npz
from simulator.errors import DatasetError
from simulator.population import Array, Population

# Data sets in the layouts of LEAF, JSON with `users`, and of svmlight, a file for each user.
#
# Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar, "LEAF: a benchmark for federated settings", 2018. Files lie
# in the data set's folder, or in its folders `train` and `test`, as LEAF's preprocessing writes them. A user in both
# gets the examples of both, because users are held out here, not examples.


Fields = dict[str, Array]
T = TypeVar("T", "Images", "Texts")


class Images(msgspec.Struct, frozen=True):
    """A user of FEMNIST: pixels from 0 to 1, 784 of each image, and classes."""

    x: list[list[float]]
    y: list[int]


class Texts(msgspec.Struct, frozen=True):
    """A role of Shakespeare: 80 characters, and the one that follows."""

    x: list[str]
    y: list[str]


class LeafFile(msgspec.Struct, Generic[T], frozen=True):
    """A file of users of one of these kinds."""

    users: list[str]
    num_samples: list[int]
    user_data: dict[str, T]


_IMAGES, _TEXTS = decoder(LeafFile[Images]), decoder(LeafFile[Texts])


def leaf_femnist(data: Path) -> Population:
    """Writers of 62 characters. `x` float32 (1, 28, 28), where 1 is paper; `y` int64."""

    def convert(user: Images) -> Fields:
        x = np.array(user.x, np.float32).reshape(len(user.y), 1, 28, 28)
        return {"x": x, "y": np.array(user.y, np.int64)}

    return _population(data / "leaf_femnist", _IMAGES.decode, convert, 62)


def leaf_shakespeare(data: Path) -> Population:
    """Roles. `x` and `y` int64 (80,): characters, and the ones that follow.

    As in LEAF, every character of a role is the last of an example, so examples overlap. LEAF predicts only the last
    character, this data set every one.
    """

    def convert(user: Texts) -> Fields:
        texts = [characters(text + following) for text, following in zip(user.x, user.y, strict=True)]
        both = np.array(texts, np.int64).reshape(len(texts), WINDOW + 1)
        return {"x": both[:, :-1].copy(), "y": both[:, 1:].copy()}

    return _population(data / "leaf_shakespeare", _TEXTS.decode, convert, len(CHARACTERS) + 4)


def _population(
    folder: Path, decode: Callable[[bytes], LeafFile[T]], convert: Callable[[T], Fields], classes: int
) -> Population:
    shards: dict[str, list[Fields]] = {}
    for path in _json_files(folder):
        try:
            leaf = decode(path.read_bytes())
            for user, count in zip(leaf.users, leaf.num_samples, strict=True):
                of_user = leaf.user_data[user]
                if not len(of_user.x) == len(of_user.y) == count:
                    raise ValueError(f"user {user!r} has {len(of_user.x)} x and {len(of_user.y)} y, not {count}")
                shards.setdefault(user, []).append(convert(of_user))
        except (*UNDECODABLE, KeyError, ValueError) as error:
            raise DatasetError(f"{path} is not in LEAF's layout: {error}") from error
    whole = [{name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")} for parts in shards.values()]
    return Population.of(list(shards), whole, classes)


def _json_files(folder: Path) -> Iterator[Path]:
    paths = sorted(path for place in (folder, folder / "train", folder / "test") for path in place.glob("*.json"))
    if not paths:
        raise DatasetError(f"{folder} holds no .json, nor do train/ and test/ in it")
    yield from paths


# Examples in svmlight format, one file `USER.svm` for each user: sparse features and a label of two classes.
#
#     <label> <index>:<value> <index>:<value> … # comment
#
# Labels are −1 or 0, and 1; indices begin at 1. Konečný et al.'s problem has this form. Examples become dense arrays,
# so use at most some thousands of features.

LABELS = {"-1": 0, "0": 0, "1": 1, "+1": 1}
MOST_NUMBERS = 1 << 29
"""The most numbers in all examples together, when dense: 2 GiB."""

LARGEST = float(np.finfo(np.float32).max)
"""The largest number of float32."""
MOST_SHOWN = 80
"""The most characters of a malformed word that an error shows."""

Example = tuple[int, dict[int, float]]
"""The class, and the values by index from 1."""


def svmlight(data: Path) -> Population:
    """The users of `data/svmlight/*.svm`, by name. `x` float32 (largest index + 1,), a constant 1 last; `y` int64.

    Raises DatasetError, naming file and line, when there are no users or something is malformed.
    """
    folder = data / "svmlight"
    users = {path.stem: _read_svmlight(path) for path in sorted(folder.glob("*.svm"))}
    if not users:
        raise DatasetError(f"{folder} holds no file USER.svm")
    largest = max((index for examples in users.values() for _, values in examples for index in values), default=0)
    numbers = (largest + 1) * sum(map(len, users.values()))
    if numbers > MOST_NUMBERS:
        raise DatasetError(
            f"{folder} has features up to index {largest:,}: dense, its examples are {numbers:,} numbers, more than "
            f"{MOST_NUMBERS:,}; leave rare features out"
        )
    return Population.of(list(users), [_dense(examples, largest) for examples in users.values()])


def _read_svmlight(path: Path) -> list[Example]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {why(error)}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            examples.append(_example(words, f"{path}:{number}"))
    if not examples:
        raise DatasetError(f"{path} holds no examples")
    return examples


def _example(words: list[str], where: str) -> Example:
    if words[0] not in LABELS:
        raise DatasetError(f"{where}: the label is {words[0][:MOST_SHOWN]!r}, not one of {', '.join(LABELS)}")
    values = {}
    for word in words[1:]:
        name, _, text = word.partition(":")
        try:
            if "_" in word:
                raise ValueError("Python would read 1_0 as 10")
            index, value = int(name), float(text)
        except ValueError:
            raise DatasetError(f"{where}: {word[:MOST_SHOWN]!r} is not index:value, as in 7:0.5") from None
        if index < 1 or not abs(value) <= LARGEST:
            raise DatasetError(f"{where}: {word[:MOST_SHOWN]!r} needs an index from 1 and a finite value of float32")
        if index in values:
            raise DatasetError(f"{where}: index {index} is there twice")
        values[index] = value
    return LABELS[words[0]], values


def _dense(examples: list[Example], largest: int) -> dict[str, Array]:
    x = np.zeros((len(examples), largest + 1), np.float32)
    x[:, -1] = 1
    for row, (_, values) in enumerate(examples):
        x[row, np.array(list(values), np.int64) - 1] = list(values.values())
    return {"x": x, "y": np.array([label for label, _ in examples], np.int64)}


# A user's own data sets: npz or Parquet files with users' examples, or a function.


USER = "user"
UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
"""The columns of an index of pandas that has no name: it numbers rows, and is no field."""


def users_of(path: Path) -> Population:
    """The users of a file, or of all files of a folder. Raises DatasetError, naming the file."""
    shards: dict[str, list[dict[str, Array]]] = {}
    for file in _files(path):
        fields = _read(file)
        for user, shard in _by_user(fields, file):
            shards.setdefault(user, []).append(shard)
    kinds = {user: _kinds(parts[0]) for user, parts in shards.items()}
    first, expected = next(iter(kinds.items()))
    for user, parts in shards.items():
        for part in parts:
            if _kinds(part) != expected:
                raise DatasetError(
                    f"{path}: the examples of {user!r} are {_shown(_kinds(part))}, those of {first!r} "
                    f"{_shown(expected)}; all need the same fields"
                )
    whole = [{name: np.concatenate([part[name] for part in parts]) for name in expected} for parts in shards.values()]
    return Population.of(list(shards), whole)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DatasetError(f"{path} does not exist")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if not file.name.startswith("."))
    if not files:
        raise DatasetError(f"{path} is empty; it needs a file USER.npz or USER.parquet for each user")
    folders = [file.name for file in files if file.is_dir()]
    if folders:
        raise DatasetError(f"{path} holds a folder, {folders[0]!r}; a data set is a folder of files")
    others = [file.name for file in files if file.suffix not in READERS]
    if others:
        raise DatasetError(
            f"{path} holds {others[0]!r}, of another format; data sets are files of {' or '.join(READERS)}"
        )
    return files


def _read(path: Path) -> dict[str, Array]:
    arrays = READERS[path.suffix](path)
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if not set(arrays) - {USER} or not min(lengths.values()):
        raise DatasetError(f"{path} holds no examples")
    if len(set(lengths.values())) > 1:
        raise DatasetError(f"{path}: every field needs a row for each example, but there are {_shown(lengths)}")
    fields = {name: _values(array, name, path) for name, array in arrays.items()}
    check_labels(fields, f"{path}: ")
    return fields


def _values(array: Array, name: str, path: Path) -> Array:
    where = f"{path}: field {name!r}"
    if name == USER:
        if array.ndim != 1:
            raise DatasetError(f"{where} has shape {list(array.shape)}; it needs a name for each example")
        if array.dtype.kind not in "OUSiufb":
            raise DatasetError(f"{where} is {array.dtype}; users are named by texts or whole numbers")
        return np.array(names_of(array, where), object)
    if array.dtype.kind == "f":
        return float32_of(array, where, "save it as int64, or as float32 if that is meant")
    if array.dtype.kind in "iub":
        return array if array.dtype == np.uint8 else int64_of(array, where)
    if array.ndim == 1 and all(isinstance(value, str) for value in array.tolist()):
        return array.astype(object)  # of any length, until all files are read
    raise DatasetError(f"{where} is {array.dtype}, neither numbers nor texts")


def _by_user(fields: Mapping[str, Array], path: Path) -> Iterator[tuple[str, dict[str, Array]]]:
    """Users and their examples, in the order of the file."""
    if USER not in fields:
        yield path.stem, dict(fields)
        return
    names, owners = np.unique(fields[USER], return_inverse=True)
    for number, name in enumerate(names):
        rows = np.flatnonzero(owners == number)
        yield str(name), {field: array[rows] for field, array in fields.items() if field != USER}


def _kinds(shard: Mapping[str, Array]) -> dict[str, str]:
    return {name: f"{array.dtype}{list(array.shape[1:])}" for name, array in sorted(shard.items())}


def _shown(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())


def _read_parquet(path: Path) -> dict[str, Array]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:  # which names columns that are there twice
            table = file.read()
        index = (table.schema.pandas_metadata or {}).get("index_columns", [])
    except Exception as error:  # malformed files raise many kinds
        raise DatasetError(f"{path} is no Parquet file that can be read: {reason(error)}") from error
    names = [name for name in table.column_names if not (name in index and UNNAMED_INDEX.fullmatch(name))]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DatasetError(f"{path} has {names.count(twice[0])} columns {twice[0]!r}; give each a name of its own")
    if not table.num_rows:
        return {}
    return {name: _array(table.column(name).combine_chunks(), name, f"{path}: column {name!r}") for name in names}


def _array(column: Any, name: str, where: str, each: int = 1) -> Array:
    """A column of Arrow as an array; lists give it further axes. each: its values of a row of the file."""
    import pyarrow.compute
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        row = column.is_null().to_numpy(zero_copy_only=False).argmax() // each
        raise DatasetError(
            f"{where} has {column.null_count} missing values, the first in row {row}; fill them in, or leave the "
            "examples out"
        )
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        if not (_is_plain(column.type) or (name == USER and types.is_binary(column.type))):
            raise DatasetError(
                f"{where} is {column.type}, neither numbers nor texts; leave it out, or write numbers or texts"
            )
        values: Array = column.to_numpy(zero_copy_only=False)
        return values
    lengths = pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False)
    if (lengths != lengths[0]).any():
        row = (lengths != lengths[0]).argmax() // each
        raise DatasetError(
            f"{where} has lists of {lengths.min()} to {lengths.max()} values; all need the same length, and row {row} "
            "is the first of another"
        )
    inner = _array(column.flatten(), name, where, each * max(int(lengths[0]), 1))
    return inner.reshape(len(column), -1 if len(inner) else 0, *inner.shape[1:])


def _is_plain(kind: Any) -> bool:
    """Whether a type of Arrow is numbers or texts."""
    from pyarrow import types

    numbers = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    return bool(numbers or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


READERS = {".npz": read_npz, ".parquet": _read_parquet}
"""The readers of files' arrays, by suffix."""


def is_own(name: str) -> bool:
    """Whether a name is `package.module:function`, or a path that exists or has a separator."""
    return ":" in name or "/" in name or Path(name).exists()


def own(name: str) -> Population:
    """The population that `package.module:function` returns, or the one at a path.

    Raises DatasetError, naming what is wrong with the data.
    """
    path = Path(name)
    return users_of(path) if path.exists() or ":" not in name else _returned_by(name)


def _returned_by(name: str) -> Population:
    module, _, function = name.partition(":")
    try:
        make = getattr(import_own(module), function)
    except Exception as error:  # whatever the user's own code raises
        raise DatasetError(
            f"cannot import data set {name!r}: {reason(error)}; it is read as package.module:function, since no file "
            "or folder is called so"
        ) from error
    try:
        population = make()
    except Exception as error:
        raise DatasetError(f"data set {name} fails with {reason(error)}") from error
    if not isinstance(population, Population):
        raise DatasetError(f"{name} returned {type(population).__name__}, expected simulator.population.Population")
    return population
