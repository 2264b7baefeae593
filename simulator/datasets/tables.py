"""A user's own tables: npz, CSV, Parquet and Arrow files, with an array or a column for each field of an example.

An npz holds an array for each field, with an example in every row; the others hold a column for each, where a vector or
an image is a list, or lists of lists, of equal length. A field `user` names each example's user; without it a file is
one user, named after the file. Numbers become types that models read: float32, int64 or uint8; a text in each row
becomes bytes, as devices keep them. A folder that `save_to_disk` of Hugging Face's `datasets` wrote is one Arrow table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from export.errors import reason
from simulator.columns import check_labels, float32_of, int64_of, label_in, names_of, numbered
from simulator.configuration import EVERY_COLUMN, USER, Columns
from simulator.datasets.bundled import read_npz
from simulator.errors import DatasetError
from simulator.population import Array, Population

UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
"""The columns of an index of pandas that has no name: it numbers rows, and is no field."""
HF_STATE, HF_PARTS = "state.json", "dataset_dict.json"
"""The files by which a folder of `save_to_disk` is known: of a data set, and of several parts of one."""


def users_of(path: Path, columns: Columns = EVERY_COLUMN) -> Population:
    """The users of a file, or of all files of a folder. Raises DatasetError, naming the file."""
    shards: dict[str, list[dict[str, Array]]] = {}
    dropped = 0
    classes: tuple[str, ...] = ()
    for file in _files(path):
        fields, lost, classes = _read(file, columns)
        dropped += lost
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
    if columns.target:
        classes = numbered(whole, label_in(whole[0])) or classes
    return Population.of(list(shards), whole, len(classes) or None, class_names=classes, dropped=dropped)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DatasetError(f"{path} does not exist")
    if (path / HF_PARTS).is_file():
        parts = [part.name for part in sorted(path.iterdir()) if (part / HF_STATE).is_file()]
        raise DatasetError(f"{path} holds the parts {', '.join(parts)} of a data set; name one, as {path / parts[0]}")
    if path.is_file() or (path / HF_STATE).is_file():
        files = [path]
    else:
        files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    if not files:
        raise DatasetError(f"{path} is empty; it needs a file USER.npz or USER.parquet for each user")
    folders = [file.name for file in files if file.is_dir() and file != path]
    if folders:
        raise DatasetError(f"{path} holds a folder, {folders[0]!r}; a data set is a folder of files")
    others = [file.name for file in files if file.is_file() and file.suffix not in READERS]
    if others:
        raise DatasetError(
            f"{path} holds {others[0]!r}, of another format; data sets are files of {', '.join(READERS)}"
        )
    return files


def _read(path: Path, columns: Columns) -> Table:
    """The fields of a file, how many rows were left out, and the names of classes that the file itself gives."""
    reader = READERS[path.suffix] if path.is_file() else _read_saved
    arrays, dropped, classes = reader(path, columns)
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetError(f"{path}: every field needs a row for each example, but there are {_shown(lengths)}")
    if columns.drop_missing:
        arrays, without = _without_nan(arrays)
        dropped += without
    if not set(arrays) - {columns.user} or not min(map(len, arrays.values())):
        raise DatasetError(f"{path} holds no examples" + (f": each of {dropped} rows lacks a value" if dropped else ""))
    fields = {name: _values(array, name, path, columns) for name, array in arrays.items()}
    fields = {USER if name == columns.user else name: array for name, array in fields.items()}
    if columns.inputs:
        fields = _named(fields, columns, path)
    else:
        check_labels(fields, f"{path}: ")
    return fields, dropped, classes


def _without_nan(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], int]:
    """The rows in which no fraction is NaN, and how many others there were."""
    fractions = [array.reshape(len(array), -1) for array in arrays.values() if array.dtype.kind == "f"]
    whole = ~np.any([np.isnan(array).any(1) for array in fractions], 0) if fractions else np.ones(1, bool)
    if whole.all():
        return dict(arrays), 0
    return {name: array[whole] for name, array in arrays.items()}, int((~whole).sum())


def _named(fields: Mapping[str, Array], columns: Columns, path: Path) -> dict[str, Array]:
    """The fields that a model reads: the inputs together, the target, and the user."""
    texts = [name for name in columns.inputs if fields[name].dtype.kind == "O"]
    if texts and len(columns.inputs) > 1:
        raise DatasetError(
            f"{path}: column {texts[0]!r} holds texts beside other inputs; leave it out, or write a column of 0 and 1 "
            "for each of its values"
        )
    vectors = [name for name in columns.inputs if fields[name].ndim > 1]
    if vectors and len(columns.inputs) > 1:
        raise DatasetError(f"{path}: column {vectors[0]!r} holds lists; make it the only one of the inputs")
    chosen = {name: array for name, array in fields.items() if name == USER}
    if texts:
        return chosen | {"text": fields[texts[0]], "label": fields[columns.target]}
    remedy = "scale it, or write it as fractions"
    numbers = [float32_of(fields[name], f"{path}: column {name!r}", remedy) for name in columns.inputs]
    x = numbers[0] if vectors else np.stack(numbers, 1)
    return chosen | {"x": x, "y": fields[columns.target]}


def _values(array: Array, name: str, path: Path, columns: Columns) -> Array:
    where = f"{path}: field {name!r}"
    if name == columns.user:
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


Table = tuple[dict[str, Array], int, tuple[str, ...]]
"""The arrays of a file, how many rows were left out, and the names of its target's classes, if it has them."""


def _read_arrays(path: Path, columns: Columns) -> Table:
    arrays = read_npz(path)
    return {name: arrays[name] for name in columns.read(list(arrays), str(path))}, 0, ()


def _read_parquet(path: Path, columns: Columns) -> Table:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:  # which names columns that are there twice
            table = file.read()
        index = (table.schema.pandas_metadata or {}).get("index_columns", [])
    except Exception as error:  # malformed files raise many kinds
        raise DatasetError(f"{path} is no Parquet file that can be read: {reason(error)}") from error
    names = [name for name in table.column_names if not (name in index and UNNAMED_INDEX.fullmatch(name))]
    return _of_arrow(table, names, path, columns)


def _read_csv(path: Path, columns: Columns) -> Table:
    """Numbers and truths are told by how they look, but users stay as they are written: 007 is not 7."""
    import pyarrow
    import pyarrow.csv

    kept = pyarrow.csv.ConvertOptions(column_types={columns.user: pyarrow.string()}, strings_can_be_null=True)
    try:
        table = pyarrow.csv.read_csv(path, convert_options=kept)
    except Exception as error:  # malformed files raise many kinds
        raise DatasetError(f"{path} is no CSV file that can be read: {reason(error)}") from error
    if len(table.column_names) == 1 and any(mark in table.column_names[0] for mark in ";\t"):
        raise DatasetError(f"{path} has one column, {table.column_names[0]!r}; separate columns by commas")
    return _of_arrow(table, table.column_names, path, columns)


def _read_saved(path: Path, columns: Columns) -> Table:
    """A folder of `datasets.Dataset.save_to_disk`; its class labels have names."""
    import pyarrow
    import pyarrow.ipc

    try:
        files = [path / file["filename"] for file in json.loads((path / HF_STATE).read_bytes())["_data_files"]]
        table = pyarrow.concat_tables([pyarrow.ipc.open_stream(file.read_bytes()).read_all() for file in files])
        kept = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    except Exception as error:  # malformed files raise many kinds
        raise DatasetError(f"{path} is no data set of save_to_disk that can be read: {reason(error)}") from error
    arrays, dropped, _ = _of_arrow(table, table.column_names, path, columns)
    feature = kept.get("info", {}).get("features", {}).get(columns.target, {})
    return arrays, dropped, tuple(map(str, feature.get("names", ())))


def _of_arrow(table: Any, names: Sequence[str], path: Path, columns: Columns) -> Table:
    """The columns of a table that are read."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DatasetError(f"{path} has {names.count(twice[0])} columns {twice[0]!r}; give each a name of its own")
    wanted = columns.read(names, str(path))
    rows = table.num_rows
    if not rows:
        return {}, 0, ()
    table = table.select(wanted)
    if columns.drop_missing:
        table = table.drop_null()
    arrays = {
        name: _array(table.column(name).combine_chunks(), f"{path}: column {name!r}", names_users=name == columns.user)
        for name in wanted
    }
    return arrays, rows - table.num_rows, ()


def _array(column: Any, where: str, each: int = 1, *, names_users: bool = False) -> Array:
    """A column of Arrow as an array; lists give it further axes. each: its values of a row of the file."""
    import pyarrow.compute
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        row = column.is_null().to_numpy(zero_copy_only=False).argmax() // each
        raise DatasetError(
            f"{where} has {column.null_count} missing values, the first in row {row}; fill them in, or leave the "
            "examples out (--drop-missing)"
        )
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        if not (_is_plain(column.type) or (names_users and types.is_binary(column.type))):
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
    inner = _array(column.flatten(), where, each * max(int(lengths[0]), 1))
    return inner.reshape(len(column), -1 if len(inner) else 0, *inner.shape[1:])


def _is_plain(kind: Any) -> bool:
    """Whether a type of Arrow is numbers or texts."""
    from pyarrow import types

    numbers = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    return bool(numbers or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


READERS: dict[str, Callable[[Path, Columns], Table]] = {
    ".npz": _read_arrays,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""The readers of files' arrays, by suffix."""
