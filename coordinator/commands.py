"""Commands from the API to the driver, and the promise of an answer."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.replicas import MaskedAnswer, MaskedNews, Share, SharedRound
from coordinator.rules.selection import Eligibility
from fedcore.params import Float32
from fedcore.wire.messages import Abort, AssignmentAnswer, CheckInAnswer, Receipt

_GATHER_S = 0.01
"""Commands that come within this time share a turn of the driver and its transaction."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Command(Generic[T_co]):
    """A request to the driver; T_co is its answer. A refusal is raised instead."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CheckInDevice(Command[CheckInAnswer]):
    """A device checks in to a population, with the token of its last rejection or "".

    signed: when it signed that, in seconds since 1970.
    """

    population: str
    device: str
    eligibility: Eligibility
    token: str = ""
    signed: int = 0


@dataclass(frozen=True, slots=True)
class AwaitAssignment(Command[AssignmentAnswer]):
    """A device waits in its session for an assignment of one of `tasks`, or of any (None), at most `wait_s`."""

    session: str
    device: str
    wait_s: float
    tasks: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class CancelWait(Command[None]):
    """The connection on which a session waited is gone: a device that gets no answer must not be selected.

    answer: the future of that very wait. A wait on another connection, or of another device, goes on.
    """

    session: str
    answer: Future[AssignmentAnswer]


@dataclass(frozen=True, slots=True)
class CountReport(Command[Receipt]):
    """The report of an assignment: `vector` (L,) is checked against its layout; `sha256` is of its body.

    shared: the round, if another replica drives it and this one adds the report to a sum of its own.
    """

    assignment: str
    sha256: str
    vector: Float32
    shared: SharedRound | None = None


@dataclass(frozen=True, slots=True)
class TakeShare(Command[None]):
    """What another replica says of a round that this one drives. total: the sum (L,) of its reports, once it comes."""

    replica: str
    share: Share
    total: NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class PutMessage(Command[None]):
    """A device's message `number`, with its SHA-256, in the secure aggregation of its assignment's round.

    device: the id of the signer of the request. then: waits `wait_s` seconds for the message of the next number, once
    this one is taken.
    """

    assignment: str
    device: str
    number: int
    message: bytes
    sha256: str
    wait_s: float = 0.0
    then: Future[bytes | None] | None = None


@dataclass(frozen=True, slots=True)
class AwaitMessage(Command[bytes | None]):
    """The message `number` to a device in a secure aggregation; None when there is none within `wait_s`."""

    assignment: str
    number: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class ExchangeMasked(Command[MaskedAnswer]):
    """What another replica says of masked reports, with the sums (W,) of the shares that have one."""

    news: MaskedNews
    sums: Sequence[NDArray[np.uint64] | None]


@dataclass(frozen=True, slots=True)
class AbortAssignment(Command[None]):
    """A device gives up its assignment."""

    assignment: str
    message: Abort


DurableCommand: TypeAlias = CountReport | AbortAssignment | TakeShare
"""What needs a transaction."""


class QueuedCommand(NamedTuple):
    """A command and the future of its answer."""

    command: Command[Any]
    future: Future[Any]


class Inbox:
    """Commands that wait for the driver's next turn, at most `limit` of them. Any thread puts in, the driver takes out.

    Reports wake the driver from its sleep only: a device does not wait for its receipt, and the more of them share a
    transaction the better.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reports: queue.SimpleQueue[QueuedCommand] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[QueuedCommand] = queue.SimpleQueue()
        self._taken_at = -math.inf
        self._asleep = False

    def __len__(self) -> int:
        return self._reports.qsize() + self._others.qsize()

    def put(self, command: Command[T]) -> Future[T]:
        """Queue a command. Raises queue.Full."""
        if len(self) >= self._limit:
            raise queue.Full
        future: Future[T] = Future()
        gathers = isinstance(command, CountReport) and not self._asleep
        (self._reports if gathers else self._others).put(QueuedCommand(command, future))
        return future

    def wake(self) -> None:
        """End a wait of `take`."""
        nothing: Future[None] = Future()
        nothing.cancel()
        self._others.put(QueuedCommand(Command(), nothing))

    def take(self, most: int, wait_s: float, *, asleep: bool = False) -> list[QueuedCommand]:
        """The oldest commands whose answers are still awaited, reports first. Waits `wait_s` for one that is no report.

        Not sooner after the last time than `_GATHER_S`. asleep: a report ends the wait too.
        """
        time.sleep(max(0.0, self._taken_at + _GATHER_S - time.monotonic()))
        self._asleep = asleep and not self._reports.qsize()
        others: list[QueuedCommand] = []
        with suppress(queue.Empty):
            others.append(self._others.get(timeout=wait_s) if wait_s else self._others.get_nowait())
        reports = _drain(self._reports, most // 2)
        taken = reports + others + _drain(self._others, most - len(others) - len(reports))
        self._taken_at, self._asleep = time.monotonic(), False
        return [queued for queued in taken if queued.future.set_running_or_notify_cancel()]


def _drain(waiting: queue.SimpleQueue[QueuedCommand], most: int) -> list[QueuedCommand]:
    taken: list[QueuedCommand] = []
    with suppress(queue.Empty):
        while len(taken) < most:
            taken.append(waiting.get_nowait())
    return taken


def settle(future: Future[Any], outcome: object) -> None:
    """Answer a future, once, with a value or an exception. One that was answered or cancelled before stays so."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
