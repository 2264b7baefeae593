"""What the API asks of the driver, and the promise of an answer."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedcore.params import Float32
from fedcore.wire.messages import Abort, AssignmentAnswer, CheckIn, CheckInAnswer, Receipt

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
    """A device's message of that number in the secure aggregation that its assignment is part of."""

    assignment: str
    number: int
    message: bytes


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
    """Requests that wait for the driver's next turn, at most `limit` of them. Anyone puts in, the driver takes out."""

    def __init__(self, limit: int) -> None:
        self._queue: queue.Queue[Submission] = queue.Queue(limit)

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, request: Request[T]) -> Future[T]:
        """Queue a request. Raises queue.Full."""
        future: Future[T] = Future()
        self._queue.put_nowait(Submission(request, future))
        return future

    def take(self, most: int, wait_s: float) -> list[Submission]:
        """The oldest requests whose askers still wait; the first one may take `wait_s` to come."""
        taken: list[Submission] = []
        with suppress(queue.Empty):
            taken.append(self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait())
            while len(taken) < most:
                taken.append(self._queue.get_nowait())
        return [one for one in taken if one.future.set_running_or_notify_cancel()]


def settle(future: Future[Any], outcome: object) -> None:
    """Answer a future, once, with a value or an exception; whoever asked may have left, or been answered already."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
