"""What the API asks of the driver, and the promise of an answer."""

from __future__ import annotations

import math
import queue
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedcore.params import Float32
from fedcore.wire.messages import Abort, AssignmentAnswer, CheckIn, CheckInAnswer, Receipt

_GATHER_S = 0.01
"""What comes within this time shares a turn of the driver, and its transaction."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Request(Generic[T_co]):
    """Something asked of the driver; T_co is the answer. A refusal is raised instead."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Arrive(Request[CheckInAnswer]):
    """A device checks in."""

    population: str
    device: str
    message: CheckIn


@dataclass(frozen=True, slots=True)
class Wait(Request[AssignmentAnswer]):
    """A device waits in its session for an assignment of one of `tasks`, or of any, at most `wait_s`."""

    session: str
    device: str
    wait_s: float
    tasks: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class HangUp(Request[None]):
    """The connection on which a session waited is gone: do not select a device that cannot hear it.

    answer: the promise of that very wait. Another connection's, or another device's, says nothing of this one.
    """

    session: str
    answer: Future[AssignmentAnswer]


@dataclass(frozen=True, slots=True)
class Report(Request[Receipt]):
    """An assignment's report: `vector` (L,) is checked against its layout; `sha256` is of its body."""

    assignment: str
    sha256: str
    vector: Float32


@dataclass(frozen=True, slots=True)
class Say(Request[None]):
    """A device's message of that number, and its SHA-256, in the secure aggregation that its assignment is part of."""

    assignment: str
    number: int
    message: bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class Hear(Request[bytes | None]):
    """The message of that number to a device in a secure aggregation; None when there is none within `wait_s`."""

    assignment: str
    number: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class GiveUp(Request[None]):
    """A device gives up its assignment."""

    assignment: str
    message: Abort


@dataclass(frozen=True, slots=True)
class Submission:
    """A request and the future that its asker awaits."""

    request: Request[Any]
    future: Future[Any]


class Inbox:
    """Requests that wait for the driver's next turn, at most `limit` of them. Anyone puts in, the driver takes out.

    Reports do not wake the driver: nobody waits for a receipt, and the more of them share a transaction the better.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reports: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        self._taken_at = -math.inf

    def __len__(self) -> int:
        return self._reports.qsize() + self._others.qsize()

    def put(self, request: Request[T]) -> Future[T]:
        """Queue a request. Raises queue.Full."""
        if len(self) >= self._limit:
            raise queue.Full
        future: Future[T] = Future()
        (self._reports if isinstance(request, Report) else self._others).put(Submission(request, future))
        return future

    def take(self, most: int, wait_s: float) -> list[Submission]:
        """The oldest requests whose askers still wait, reports first; another than a report may take `wait_s` to come.

        Not sooner after the last time than `_GATHER_S`.
        """
        time.sleep(max(0.0, self._taken_at + _GATHER_S - time.monotonic()))
        others: list[Submission] = []
        with suppress(queue.Empty):
            others.append(self._others.get(timeout=wait_s) if wait_s else self._others.get_nowait())
        reports = _drain(self._reports, most // 2)
        taken = reports + others + _drain(self._others, most - len(others) - len(reports))
        self._taken_at = time.monotonic()
        return [one for one in taken if one.future.set_running_or_notify_cancel()]


def _drain(waiting: queue.SimpleQueue[Submission], most: int) -> list[Submission]:
    taken: list[Submission] = []
    with suppress(queue.Empty):
        while len(taken) < most:
            taken.append(waiting.get_nowait())
    return taken


def settle(future: Future[Any], outcome: object) -> None:
    """Answer a future, once, with a value or an exception; whoever asked may have left, or been answered already."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
