"""Rows as values, within one transaction, what SQLite and PostgreSQL do differently, and counts not written yet."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET
from sqlalchemy import Column, ColumnElement, Executable, Insert, Row, Select, Table, select, text, true
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from coordinator.errors import InvalidTask, UnusableStore
from coordinator.rules.entities import RoundRecord, Task
from coordinator.rules.states import RoundState
from coordinator.rules.task_settings import TaskSettings
from coordinator.store.tables import ROUNDS
from fedcore.validation import build, converter
from fedcore.wire.messages import CheckIn

# Counts that have not been written yet: of sessions and of models in use, and nothing of a single device.
#
# They are kept in memory, and written with the next transaction that happens anyway, or after a minute, so that
# counting costs no transaction. A crash loses those of a moment.


K = TypeVar("K")


class PendingCounts(Generic[K]):
    """Counts by key. most: of keys at once; others are left out until the counts are taken."""

    def __init__(self, most: int | None = None) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[K] = Counter()
        self._most = most

    def add(self, keys: Iterable[K]) -> None:
        """Count each key once."""
        with self._lock:
            for key in keys:
                if self._most is None or len(self._counts) < self._most or key in self._counts:
                    self._counts[key] += 1

    def any(self) -> bool:
        """Whether there are any."""
        with self._lock:
            return bool(self._counts)

    def take(self) -> Mapping[K, int]:
        """The counts since the last time; they are the caller's to write from now on."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return taken

    def put_back(self, counts: Mapping[K, int]) -> None:
        """Keep counts that were taken and could not be written."""
        with self._lock:
            self._counts.update(counts)


DAY_S = 86_400
_MOST = 10_000
"""Keys between two writes: devices may state anything, and only released versions are written."""


class Stated(NamedTuple):
    """What a check-in of a population stated of a model: the version in use, or refused; day: UTC, since 1970."""

    population: str
    name: str
    number: int
    day: int
    refused: bool


ModelCounts: TypeAlias = Mapping[Stated, int]


class ModelTally(PendingCounts[Stated]):
    """Counts that have not been written yet."""

    def __init__(self) -> None:
        super().__init__(_MOST)

    def count(self, population: str, message: CheckIn, now: float) -> None:
        """Count what a check-in states, at a time in seconds since 1970."""
        if message.models is UNSET and message.refused is UNSET:
            return
        day = int(now // DAY_S)
        stated = ((message.models or {}, False), (message.refused or {}, True))
        self.add(
            Stated(population, name, number, day, refused)
            for numbers, refused in stated
            for name, number in numbers.items()
        )


# Counts of sessions by their sequence of steps.
#
# A shape is the steps of a session with " > " between: a check-in that is rejected at once is one step; another session
# may be `accepted > waited > assigned > fetched checkpoint > reported`.

Counts: TypeAlias = Mapping[tuple[str, str, str], int]
"""Sessions by population, task (empty before there is one) and shape."""


class SessionCounts(PendingCounts[tuple[str, str, str]]):
    """Counts that have not been written yet."""

    def count(self, population: str, task: str, steps: Iterable[str]) -> None:
        """Count a session that ended after these steps."""
        self.add([(population, task, " > ".join(steps))])


# Rows as values, within one transaction, and what SQLite and PostgreSQL do differently in it.


T = TypeVar("T")
_MOST_NAMED = 1000
"""Ids in one statement."""


class WithinTransaction:
    """Rows of some tables within one transaction. at: its time, in seconds since 1970.

    only: the populations to which whoever looks is limited. What operators may ask for shows nothing of others.
    """

    def __init__(self, connection: Connection, at: float, *, writing: bool, only: frozenset[str] | None = None) -> None:
        self._connection = connection
        self._writing = writing
        self._only = only
        self._on_postgresql = connection.dialect.name == "postgresql"
        self.at = at

    def _all(self, read: Callable[[Any], T], query: Executable, values: Any = None) -> list[T]:
        """The rows of a query, each as `read` reads it."""
        return [read(row) for row in self._connection.execute(query, values)]

    def _one(self, read: Callable[[Any], T], query: Executable) -> T | None:
        """The only row of a query, as `read` reads it; None when there is none."""
        row = self._connection.execute(query).one_or_none()
        return None if row is None else read(row)

    @property
    def limited(self) -> bool:
        """Whether some populations are not to be seen, nor what belongs to none."""
        return self._only is not None

    def _shown(self, population: Column[Any]) -> ColumnElement[bool]:
        """That a row is of a population which may be seen."""
        return true() if self._only is None else population.in_(sorted(self._only))

    def _lock_writers(self, table: Table) -> None:
        """Let other writers of `table` wait until this transaction ends; readers go on. SQLite has one writer anyway.

        For a decision that rests on which rows are absent. What was read before the lock may have changed since: lock
        first, then read, then decide.
        """
        if self._on_postgresql:
            self._connection.execute(text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))

    def _held(self, query: Select[Any], table: Table) -> Select[Any]:
        """A query whose rows of `table` no other transaction changes until this one ends, if this one writes."""
        return query.with_for_update(of=table, key_share=True) if self._writing else query

    def _insert_unless(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """An insertion that can say what happens when there is a row with its key already."""
        return postgresql.insert(table) if self._on_postgresql else sqlite.insert(table)


class Part(WithinTransaction):
    """The rows of some tables, within the same transaction as a `whole`."""

    def __init__(self, whole: WithinTransaction) -> None:
        super().__init__(whole._connection, whole.at, writing=whole._writing, only=whole._only)


def slices(named: Sequence[T]) -> Iterator[Sequence[T]]:
    """These, as many at a time as one statement may name."""
    yield from (named[start : start + _MOST_NAMED] for start in range(0, len(named), _MOST_NAMED))


def adding(table: Table) -> dict[str, Insert]:
    """By dialect, the insertion of rows whose `count` is added to that of a row with the same key.

    Made once, and so compiled once: to build a statement anew costs more than to execute it.
    """
    new: dict[str, postgresql.Insert | sqlite.Insert] = {
        "postgresql": postgresql.insert(table),
        "sqlite": sqlite.insert(table),
    }
    key, count = list(table.primary_key), table.c["count"]
    return {
        dialect: one.on_conflict_do_update(index_elements=key, set_={"count": count + one.excluded["count"]})
        for dialect, one in new.items()
    }


def reader(kind: type[T], **given: Any) -> Callable[[Any], T]:
    """A function from a row to a `kind`, each of whose fields is `given`, or a column. Other columns are left out."""
    convert = converter(kind)
    return lambda row: convert({**_columns(row), **given})


def _columns(row: Row[Any]) -> dict[str, Any]:
    """The columns of a row by name; SQLAlchemy's names are a kind of text of their own, which nothing converts."""
    return dict(zip(map(str, row._fields), row, strict=True))


ROUND_ROWS = select(ROUNDS, (ROUNDS.c.ended_at - ROUNDS.c.opened_at).label("seconds"))
"""Attempts, as `round_of` reads them, without the reasons of their aborts."""
round_of = reader(RoundRecord, abort_reasons={})
ENDED = [state for state in RoundState if state.ended]
COUNTS = ("assigned", "reported", "aborted", "lost", "expired", "stale", "taken_over", "handed_on")
"""Of a round's assignments, as its value and its row have them; once it is over, the rest were not needed."""
_NEWER = "a newer version may have written them: upgrade this coordinator. Nothing was changed"
_START = ("state_sha256", "checkpoint_sha256")
_task = converter(Task)


def task_of(row: Row[Any]) -> Task:
    """The task of a row."""
    own = _columns(row)
    lineage = (row.evaluates or {}).get("lineage")
    composed = {
        "settings": settings_of(row.id, row.population, row.settings),
        "algorithm": {"name": row.algorithm, "settings": row.algorithm_settings},
        "initial": {"number": 0, "lineage": lineage, **{name: own[name] for name in _START}},
    }
    return _task({**own, **composed})


def columns_of_task(task: Task) -> dict[str, Any]:
    """The columns of a task: what `task_of` reads."""
    whole: dict[str, Any] = msgspec.to_builtins(task) | columns_of(task.settings)
    initial, algorithm = whole.pop("initial"), whole["algorithm"]
    named = {"algorithm": algorithm["name"], "algorithm_settings": algorithm["settings"]}
    return whole | named | {name: initial[name] for name in _START}


def columns_of(settings: TaskSettings) -> dict[str, Any]:
    """The columns of a task's settings. Defaults are written out, so that those of a later version change no task."""
    whole = msgspec.to_builtins(settings) | {"minimum": settings.policy.minimum}
    return {"population": whole.pop("population"), "settings": whole}


def settings_of(task_id: str, population: str, stored: Mapping[str, Any]) -> TaskSettings:
    """The settings of a task's columns; one that is not stored has its default.

    Raises UnusableStore, which names the task and what this version does not know.
    """
    try:
        return _settings(population, json.dumps(stored))
    except InvalidTask as error:
        raise UnusableStore(f"settings of task {task_id}: {error}; {_NEWER}") from error


@lru_cache(maxsize=4096)  # every task that is not over is read several times a second, and its settings stay
def _settings(population: str, stored: str) -> TaskSettings:
    return build(TaskSettings, {**json.loads(stored), "population": population})
