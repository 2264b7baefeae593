"""Columns of files and tables as models read them: the same values, or a refusal that names the row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.errors import DatasetError

Array = NDArray[np.generic]
EXACT = 1 << 53
"""Whole numbers up to this are exact in float64. Beyond it a float is a magnitude, not an identifier."""
EXACT_IN_32 = 1 << 24
"""Whole numbers up to this are exact in float32."""


def float32_of(values: Array, where: str, remedy: str) -> NDArray[np.float32]:
    """Numbers (n, …) as float32. where: file or table, and column. remedy: against rounding.

    Raises DatasetError for a number that is not finite there, and for a whole number that it would round: an identifier
    or a time would become another one.
    """
    with np.errstate(over="ignore"):
        made = values.astype(np.float32)
    bad = ~np.isfinite(made)
    row = _first(bad)
    if row is not None:
        raise DatasetError(
            f"{where} holds {_shown(values, row, bad)} in row {row}, which is no finite number of 32 bits; fill it in, "
            "or leave the row out"
        )
    rounded = _rounded(values, made)
    row = _first(rounded)
    if row is not None:
        raise DatasetError(
            f"{where} holds {_shown(values, row, rounded)} in row {row}, a whole number that float32 would round; "
            f"{remedy}"
        )
    return made


def int64_of(values: Array, where: str) -> NDArray[np.int64]:
    """Whole numbers or booleans (n, …) as int64. Raises DatasetError for others, and for one of 2**63 and more."""
    if values.dtype.kind not in "iub":
        raise DatasetError(f"{where} is {values.dtype}, not whole numbers")
    numbers: NDArray[Any] = values
    large = numbers > np.iinfo(np.int64).max if values.dtype == np.uint64 else np.zeros(values.shape, bool)
    row = _first(large)
    if row is not None:
        raise DatasetError(
            f"{where} holds {_shown(values, row, large)} in row {row}; whole numbers are below 2**63 here: number such "
            "values anew, or leave the field out"
        )
    return values.astype(np.int64)


def names_of(values: Array, where: str, rows: Sequence[int] | None = None) -> list[str]:
    """The names of users: texts, also as bytes in UTF-8, and whole numbers, so that 1.0 is the user 1.

    rows: where the values are, by default one in each row. Raises DatasetError for a row without a user.
    """
    kind: np.dtype[Any] = values.dtype
    exact = 1 << (np.finfo(kind).nmant + 1) if kind.kind == "f" else EXACT
    names = []
    for place, value in enumerate(values.tolist()):
        row = place if rows is None else rows[place]
        if value is None or value in ("", b"") or (isinstance(value, float) and math.isnan(value)):
            raise DatasetError(f"{where} has no user in row {row}; leave such rows out")
        name = _name(value, exact)
        if name is None:
            raise DatasetError(
                f"{where} holds {value!r} in row {row}, which names no user; write texts, in UTF-8, or whole numbers"
            )
        names.append(name)
    return names


def label_in(fields: Mapping[str, object]) -> str:
    """The name of the field of labels: `y`, or `label`."""
    return "y" if "y" in fields else "label"


def numbered(shards: Sequence[dict[str, Array]], name: str) -> tuple[str, ...]:
    """Number the texts in a field of all shards, in their order, in place; gives the texts. Numbers stay: ()."""
    columns = [shard[name] for shard in shards]
    if not any(column.dtype.kind in "UO" for column in columns):
        return ()
    texts, codes = np.unique(np.concatenate(columns).astype(str), return_inverse=True)
    ends = np.cumsum([len(column) for column in columns])
    for shard, own in zip(shards, np.split(codes.astype(np.int64), ends[:-1]), strict=True):
        shard[name] = own
    return tuple(texts.tolist())


def check_labels(fields: Mapping[str, Array], whose: str) -> None:
    """Raise DatasetError for texts as labels: their bytes would be taken for classes."""
    name = label_in(fields)
    if name in fields and fields[name].dtype.kind in "UO" and len(fields[name]):
        first = fields[name].tolist()[0]
        raise DatasetError(
            f"{whose}field {name!r} holds texts, {first!r} in row 0; labels are numbers: name the column as the "
            "target (--target), which numbers its texts, or number the classes from 0"
        )


def _rounded(values: Array, made: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which whole numbers float32 does not hold."""
    rounded: NDArray[np.bool_] = np.zeros(values.shape, bool)
    if values.dtype.itemsize > (2 if values.dtype.kind in "iu" else 4):
        numbers: NDArray[Any] = values
        rounded = (numbers > EXACT_IN_32) | (numbers < -EXACT_IN_32)
        if values.dtype.kind == "f":
            rounded &= (np.abs(numbers) <= EXACT) & (np.rint(numbers) == numbers)
        pairs = zip(numbers[rounded].tolist(), made[rounded].tolist(), strict=True)
        rounded[rounded] = [int(number) != int(kept) for number, kept in pairs]
    return rounded


def _name(value: Any, exact: int) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < exact else None
    return str(value)


def _first(bad: NDArray[np.bool_]) -> int | None:
    """The first row that has a bad value."""
    return int(bad.reshape(len(bad), -1).any(1).argmax()) if bad.any() else None


def _shown(values: Array, row: int, bad: NDArray[np.bool_]) -> str:
    return str(values[row][bad[row]].reshape(-1)[0])
