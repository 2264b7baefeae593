"""A population of clients: every client's examples, field by field; also from tables of pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcore.errors import facts_of
from fedcore.plan import ExampleSpec, Field
from simulator.columns import check_labels, float32_of, int64_of, label_in, names_of, numbered
from simulator.errors import DatasetError, EngineError

if TYPE_CHECKING:
    import pandas as pd


Array = NDArray[np.generic]
MOST_CLASSES = 1 << 20
"""More classes count as a mistake: tables by class would not fit in memory."""


@dataclass(frozen=True, slots=True, repr=False)
class Population:
    """Clients and their examples.

    fields: arrays (N, …) by field name, client after client; texts are bytes (N,), UTF-8. starts: int64
    (clients + 1,), where each client begins. classes: the integers in `y`, or in `label` beside texts, lie in
    0 … classes − 1, and where `y` is a sequence of tokens those in `x` too. They follow from the data if not given, and
    a subset keeps them; None if there are no such integers. Raises DatasetError when the data have more, or more than
    MOST_CLASSES, and for a field without a row for each example, or with empty rows. class_names: of classes that a
    table had as texts. dropped: the rows of the table that were left out, as they lacked a value.
    """

    clients: tuple[str, ...]
    fields: Mapping[str, Array]
    starts: NDArray[np.int64]
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    dropped: int = 0

    def __post_init__(self) -> None:
        examples = int(self.starts[-1])
        for name, array in self.fields.items():
            if array.shape[:1] != (examples,):
                raise DatasetError(
                    f"field {name!r} has shape {list(array.shape)}; it needs a row for each of {examples} examples"
                )
            if 0 in array.shape[1:]:
                raise DatasetError(f"field {name!r} holds no numbers: an example has shape {list(array.shape[1:])}")
        labels = self.labels
        if labels is None or labels.dtype.kind not in "iu" or not labels.size:
            return
        tokens = [self.fields["x"]] if labels.ndim > 1 and "x" in self.fields else []
        largest = max(int(array.max()) for array in [labels, *tokens] if array.dtype.kind in "iu")
        if largest >= MOST_CLASSES:
            raise DatasetError(f"a label is {largest}; classes count from 0, at most to {MOST_CLASSES - 1}")
        if self.classes is None:
            object.__setattr__(self, "classes", largest + 1)
        elif largest >= self.classes:
            raise DatasetError(f"a label is {largest}, but there are {self.classes} classes, from 0")

    def __repr__(self) -> str:
        classes = "" if self.classes is None else f", {self.classes:,} classes"
        fields = ", ".join(f"{name} {kind}" for name, kind in self.kinds.items())
        return f"Population({len(self):,} clients, {self.starts[-1]:,} examples: {fields}{classes})"

    def _repr_html_(self) -> str:
        each = self.sizes
        spread = f"{each.min():,} to {each.max():,}, {each.mean():.1f} in the mean"
        counts = {
            "clients": len(self),
            "examples": int(self.starts[-1]),
            "of a client": spread,
            "classes": self.classes,
        }
        return facts_of("Population", counts | {f"field {name}": kind for name, kind in self.kinds.items()})

    @property
    def kinds(self) -> dict[str, str]:
        """The type and shape of each field, by name; of texts, those that hold the longest on a device."""
        return {
            name: f"uint8[{longest(array)}]" if array.dtype == object else f"{array.dtype}{list(array.shape[1:])}"
            for name, array in self.fields.items()
        }

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Examples per client."""
        return np.diff(self.starts)

    @property
    def labels(self) -> Array | None:
        """The field `y`, or `label`."""
        return self.fields.get(label_in(self.fields))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of an example's `x`, which the built-in models read; None without that field."""
        return self.fields["x"].shape[1:] if "x" in self.fields else None

    @classmethod
    def of(
        cls,
        clients: Sequence[str],
        shards: Sequence[Mapping[str, Array]],
        classes: int | None = None,
        *,
        class_names: tuple[str, ...] = (),
        dropped: int = 0,
    ) -> Population:
        """Concatenate clients' shards, which have the same fields. Arrays of texts become bytes.

        Raises DatasetError when there is none or one is empty, when two have the same name, and when a client's fields
        differ in length, or in names, shapes or kinds of type from those of the first; and for labels that are texts.
        """
        _check_clients(clients, [max(map(len, shard.values()), default=0) for shard in shards])
        _check_shards(clients, shards)
        for client, shard in zip(clients, shards, strict=True):
            check_labels(shard, f"client {client!r}: ")
        names = list(shards[0])
        starts = np.concatenate([[0], np.cumsum([len(shard[names[0]]) for shard in shards])]).astype(np.int64)
        fields = {name: _joined([shard[name] for shard in shards]) for name in names}
        return cls(tuple(clients), fields, starts, classes, class_names, dropped)

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        *,
        user: str,
        inputs: str | Sequence[str],
        target: str,
        shape: Sequence[int] | None = None,
        drop_missing: bool = False,
    ) -> Population:
        """The population of a table of pandas with a row for each example.

        user: the column that says whose the example is; users keep the order in which they first come. inputs: columns
        of numbers, which become `x`, float32 (N, columns), or `(N, *shape)`. target: a column that becomes `y`, int64
        for whole numbers (classes), booleans and texts, which are numbered in their order, else float32. drop_missing:
        leave out rows that lack one of these. Raises DatasetError, naming column and row, for a column that is missing
        or holds something else than finite numbers, for a whole number that float32 would round or int64 cannot hold,
        for a row without a user, and for a user without rows.
        """
        return population_of(frame, user, inputs, target, shape, drop_missing=drop_missing)

    def shard(self, client: int) -> dict[str, Array]:
        """One client's examples."""
        rows = slice(self.starts[client], self.starts[client + 1])
        return {name: array[rows] for name, array in self.fields.items()}

    def subset(self, clients: Sequence[int]) -> Population:
        """The population of some clients, in the given order."""
        rows = [np.arange(self.starts[client], self.starts[client + 1]) for client in clients]
        return self.of_rows([self.clients[client] for client in clients], rows)

    def of_rows(self, names: Sequence[str], rows: Sequence[NDArray[np.int64]]) -> Population:
        """The population of clients of these names, each with these rows of all examples.

        Raises DatasetError where one has none.
        """
        _check_clients(names, [len(own) for own in rows])
        taken, starts = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
        fields = {name: array[taken] for name, array in self.fields.items()}
        return replace(self, clients=tuple(names), fields=fields, starts=starts)

    def spread(self, count: int) -> Population:
        """`count` clients, by dividing the examples of some among several: a person with several devices.

        Raises DatasetError when a client would have no example.
        """
        shares = [count // len(self) + (index < count % len(self)) for index in range(len(self))]
        names, rows, users = [], [], set(self.clients)
        for index, (client, parts) in enumerate(zip(self.clients, shares, strict=True)):
            for part in range(parts):
                name = client if parts == 1 else f"{client}.{part + 1}"
                while parts > 1 and name in users:  # a user may be called as a device of another
                    name += "'"
                names.append(name)
                rows.append(np.arange(self.starts[index] + part, self.starts[index + 1], parts))
        return self.of_rows(names, rows)

    def split(self, held_out: float, seed: int) -> tuple[Population, Population]:
        """Train and held-out users: whole clients, drawn by seed; at least one on either side."""
        order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(self))
        count = min(max(1, round(held_out * len(self))), len(self) - 1)
        if count < 1:
            raise DatasetError(
                "a population of one client has no users to hold out; --partition deals its examples to several"
            )
        return self.subset(sorted(order[count:].tolist())), self.subset(sorted(order[:count].tolist()))

    def pooled(self) -> Population:
        """The population of one client that holds all examples."""
        return replace(self, clients=("everybody",), starts=self.starts[[0, -1]])

    def split_examples(self, held_out: float, seed: int | None) -> tuple[Population, Population]:
        """The same users with some of their examples, and with the others, which are held out; at least one each.

        seed: draws the held-out examples; without one they are each user's last, the newest if examples are in order of
        time. Users with a single example are left out. Raises DatasetError when that is all of them.
        """
        generator = None if seed is None else np.random.Generator(np.random.Philox(key=[seed, 0]))
        users = [user for user in range(len(self)) if self.sizes[user] > 1]
        if not users:
            raise DatasetError("no user has two examples, one to train on and one to hold out")
        kept, out = [], []
        for user in users:
            size = int(self.sizes[user])
            order = np.arange(size)[::-1] if generator is None else generator.permutation(size)
            count = min(max(1, round(held_out * size)), size - 1)
            kept.append(self.starts[user] + np.sort(order[count:]))
            out.append(self.starts[user] + np.sort(order[:count]))
        names = [self.clients[user] for user in users]
        return self.of_rows(names, kept), self.of_rows(names, out)

    def training_on(self, spec: ExampleSpec) -> Population:
        """The clients with those of their examples that a plan runs on; clients without any are left out.

        Raises DatasetError when no example is left.
        """
        if spec.hold_out is None:
            return self
        kept = spec.kept(self.fields)
        sizes = np.add.reduceat(kept, self.starts[:-1], dtype=np.int64)
        if not sizes.any():
            raise DatasetError(f"no example is left of a share of {spec.hold_out.share:g}, {spec.hold_out.side}")
        names = tuple(name for name, size in zip(self.clients, sizes, strict=True) if size)
        fields = {name: array[kept] for name, array in self.fields.items()}
        return replace(self, clients=names, fields=fields, starts=np.concatenate([[0], np.cumsum(sizes[sizes > 0])]))

    def sample(self, cohort: int, seed: int, round_number: int) -> list[int]:
        """A uniform cohort without replacement; its order gives the slots.

        Raises EngineError when the cohort is larger than the population.
        """
        if not 1 <= cohort <= len(self):
            raise EngineError(f"a cohort of {cohort} cannot be drawn from {len(self)} clients")
        return draw(len(self), cohort, seed, round_number)

    def check(self, fields: Sequence[Field]) -> None:
        """Raise DatasetError when the examples do not have the fields that a model reads."""
        for field in fields:
            array = self.fields.get(field.name)
            if array is None:
                raise DatasetError(f"the model reads field {field.name!r}; the data set has {sorted(self.fields)}")
            if array.dtype != field.dtype or array.shape[1:] != field.shape:
                raise DatasetError(
                    f"field {field.name!r} is {self.kinds[field.name]} per example, "
                    f"the model reads {field.dtype}{list(field.shape)}"
                )
            if field.high is not None and not field.holds(array).all():
                raise DatasetError(f"field {field.name!r} holds values outside 0 … {field.high - 1}")


def _joined(arrays: Sequence[Array]) -> Array:
    """One after the other, with texts as bytes."""
    if not any(array.dtype.kind in "UO" for array in arrays):
        return np.concatenate(arrays)
    return as_bytes(np.concatenate([array.astype(object) for array in arrays]))  # not padded to the longest


def as_bytes(texts: Array) -> NDArray[np.object_]:
    """Texts (n,) as bytes in UTF-8 (n,), each as long as it is: one long text costs its own bytes alone.

    Raises DatasetError, with its place, for what is no text, and for one that UTF-8 cannot hold.
    """
    encoded = np.empty(len(texts), object)
    for place, text in enumerate(texts.tolist()):
        if not isinstance(text, str | bytes):
            raise DatasetError(f"example {place} has a {type(text).__name__} in the place of a text")
        try:
            encoded[place] = text.encode() if isinstance(text, str) else text
        except UnicodeEncodeError as error:
            raise DatasetError(f"the text of example {place} has half a character, which UTF-8 cannot hold") from error
        if encoded[place].endswith(b"\0"):
            raise DatasetError(f"the text of example {place} ends with a zero, which devices drop; leave it out")
    return encoded


def longest(texts: Array) -> int:
    """The bytes of the longest of texts (n,), at least 1: the least that a device's field for them holds."""
    return max(1, max(map(len, texts.tolist()), default=1))


def _check_clients(clients: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise DatasetError unless each of the shards of these sizes has a name and an example."""
    if len(clients) != len(sizes):
        raise DatasetError(f"there are {len(clients)} names of clients for {len(sizes)} shards; each needs one")
    if not clients:
        raise DatasetError("there are no clients")
    empty = [client for client, size in zip(clients, sizes, strict=True) if not size]
    if empty:
        raise DatasetError(f"clients without examples: {empty}")
    if len(set(clients)) < len(clients):
        twice = next(client for number, client in enumerate(clients) if client in clients[:number])
        raise DatasetError(f"two clients are called {twice!r}; give each a name of its own, or join their examples")


def _check_shards(clients: Sequence[str], shards: Sequence[Mapping[str, Array]]) -> None:
    """Raise DatasetError, naming client and field, unless the shards can be concatenated."""
    expected = {name: np.shape(array)[1:] for name, array in shards[0].items()}
    kinds = {name: _kind(array) for name, array in shards[0].items()}
    for client, shard in zip(clients, shards, strict=True):
        if set(shard) != set(expected):
            words = f"{sorted(shard)}, those of {clients[0]!r} {sorted(expected)}"
            raise DatasetError(f"the fields of client {client!r} are {words}; all need the same")
        lengths = {name: len(array) for name, array in shard.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DatasetError(f"the fields of client {client!r} differ in length: {shown}")
        for name, shape in expected.items():
            if np.shape(shard[name])[1:] != shape:
                words = f"{list(np.shape(shard[name])[1:])} per example, that of {clients[0]!r} {list(shape)}"
                raise DatasetError(f"field {name!r} of client {client!r} is {words}; all need the same shape")
            if _kind(shard[name]) != kinds[name]:
                words = f"{shard[name].dtype}, that of {clients[0]!r} {shards[0][name].dtype}"
                raise DatasetError(f"field {name!r} of client {client!r} is {words}; all need the same type")


def _kind(array: Array) -> str:
    """The kind of an array's type: joined to another, whole numbers would become fractions."""
    kind: str = np.asarray(array).dtype.kind
    return "O" if kind == "U" else kind


def draw(total: int, count: int, seed: int, number: int = 0) -> list[int]:
    """`count` of 0 … `total` − 1, drawn uniformly without replacement, by seed and number."""
    generator = np.random.Generator(np.random.Philox(key=[seed, number]))
    chosen: list[int] = generator.choice(total, count, replace=False).tolist()
    return chosen


def population_of(
    frame: pd.DataFrame,
    user: str,
    inputs: str | Sequence[str],
    target: str,
    shape: Sequence[int] | None,
    *,
    drop_missing: bool,
) -> Population:
    """As `Population.from_frame`."""
    if not all(hasattr(frame, name) for name in ("columns", "duplicated", "loc")):
        raise DatasetError(f"the frame is of type {type(frame).__name__}; expected a DataFrame of pandas")
    names = [inputs] if isinstance(inputs, str) else list(inputs)
    shape = (len(names),) if shape is None else tuple(shape)
    if not names or math.prod(shape) != len(names):
        raise DatasetError(f"{len(names)} columns of inputs do not fill an example of shape {list(shape)}")
    columns = {name: _column(frame, name) for name in (user, *names, target)}
    rows = len(frame)
    if drop_missing:
        whole = ~np.any([column.isna().to_numpy() for column in columns.values()], 0)
        columns = {name: column[whole] for name, column in columns.items()}
    left = len(columns[user])
    if not left:
        raise DatasetError("the frame has no rows" + (", each of which has all values" if rows else ""))
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
    fields = {"x": x.reshape(left, *shape), "y": _target(columns[target], target)}
    classes = numbered([fields], "y")
    each = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    shards = [{name: array[of_user] for name, array in fields.items()} for of_user in each]
    return Population.of(called, shards, len(classes) or None, class_names=classes, dropped=rows - left)


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


def _target(column: Any, name: str) -> NDArray[Any]:
    """Labels: texts or whole numbers, which are classes, or others."""
    if len(column) and column.map(lambda value: isinstance(value, str)).all():
        return np.asarray(column.to_numpy(object))
    values = _numbers(column, name, f"pandas.factorize(frame[{name!r}])[0]")
    return _float32(values, name) if values.dtype.kind == "f" else int64_of(values, f"column {name!r}")
