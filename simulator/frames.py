"""Populations from tables of pandas, a row for each example. Only the table's own methods are used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simulator.columns import float32_of, int64_of, names_of
from simulator.errors import DatasetError
from simulator.population import Population

if TYPE_CHECKING:
    import pandas as pd


def population_of(
    frame: pd.DataFrame, user: str, inputs: str | Sequence[str], label: str, shape: Sequence[int] | None
) -> Population:
    """As `Population.from_frame`."""
    if not all(hasattr(frame, name) for name in ("columns", "duplicated", "loc")):
        raise DatasetError(f"the frame is of type {type(frame).__name__}; expected a DataFrame of pandas")
    names = [inputs] if isinstance(inputs, str) else list(inputs)
    shape = (len(names),) if shape is None else tuple(shape)
    if not names or math.prod(shape) != len(names):
        raise DatasetError(f"{len(names)} columns of inputs do not fill an example of shape {list(shape)}")
    columns = {name: _column(frame, name) for name in (user, *names, label)}
    if not len(frame):
        raise DatasetError("the frame has no rows")
    codes, users = columns[user].factorize()
    if codes.min() < 0:
        raise DatasetError(
            f"column {user!r} has no user in row {int(np.flatnonzero(codes < 0)[0])}; leave such rows out"
        )
    _check_all_there(columns[user], users)
    order = np.argsort(codes, kind="stable")
    firsts = np.unique(codes, return_index=True)[1]
    raw = np.asarray(users if np.asarray(users).dtype.kind not in "Mm" else users.astype(object))
    called = names_of(raw, f"column {user!r}", firsts.tolist())
    x = np.stack([_float32(_numbers(columns[name], name), name) for name in names], 1)
    fields = {"x": x.reshape(len(frame), *shape), "y": _label(columns[label], label)}
    shards = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    return Population.of(called, [{name: array[rows] for name, array in fields.items()} for rows in shards])


def _column(frame: pd.DataFrame, name: str) -> Any:
    places = list(frame.columns).count(name)
    if places != 1:
        there = f"no column {name!r}" if not places else f"{places} columns {name!r}"
        raise DatasetError(f"the frame has {there}; there are {', '.join(map(str, frame.columns))}")
    column = frame[name]
    return column.sparse.to_dense() if hasattr(column, "sparse") else column


def _check_all_there(column: Any, users: Any) -> None:
    """Raise DatasetError for a user that a column of categories names and no row has."""
    named = getattr(column.dtype, "categories", ())
    absent = [name for name in named if name not in set(users)]
    if absent:
        raise DatasetError(
            f"user {absent[0]!r} has no rows, one of {len(absent)} such categories; leave them out by "
            f"frame[{column.name!r}].cat.remove_unused_categories()"
        )


def _numbers(column: Any, name: str, words: str = "pandas.get_dummies") -> NDArray[Any]:
    """The numbers of a column. words: what would make numbers of words.

    Raises DatasetError for a column of something else, and for a missing one.
    """
    kind = getattr(column.dtype, "numpy_dtype", column.dtype)  # pandas has types of its own, which may lack values
    if getattr(kind, "kind", "O") not in "biuf":
        raise DatasetError(
            f"column {name!r} is of type {column.dtype}, not of numbers; make it numbers first, as by "
            f"frame[{name!r}].astype('float32') or, for words, {words}"
        )
    bad = np.flatnonzero(column.isna().to_numpy())
    if bad.size:
        raise DatasetError(
            f"column {name!r} holds {column.iloc[bad[0]]} in row {bad[0]}, which is no finite number of 32 bits; fill "
            "it in, or leave the row out"
        )
    return np.asarray(column.to_numpy(dtype=kind))


def _float32(values: NDArray[Any], name: str) -> NDArray[np.float32]:
    remedy = f"scale it, or round it by frame[{name!r}].astype('float32') if that is meant"
    return float32_of(values, f"column {name!r}", remedy)


def _label(column: Any, name: str) -> NDArray[Any]:
    """Labels: whole numbers, which are classes, or others."""
    values = _numbers(column, name, f"pandas.factorize(frame[{name!r}])[0]")
    return _float32(values, name) if values.dtype.kind == "f" else int64_of(values, f"column {name!r}")
