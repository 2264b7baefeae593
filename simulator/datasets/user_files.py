"""A user's own data sets: npz or Parquet files with users' examples, or a function.

An npz holds an array for each field, with an example in every row. A Parquet file holds a column for each field; a
vector or an image is a list, or lists of lists, of equal length. A field `user` names each example's user; without it a
file is one user, named after the file. Numbers become types that models read: float32, int64 or uint8; a text in each
row becomes bytes, as devices keep them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from export.errors import reason
from fedcore.validation import import_own
from simulator.columns import check_labels, float32_of, int64_of, names_of
from simulator.datasets.bundled import read_npz
from simulator.errors import DatasetError
from simulator.population import Array, Population

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
