"""What the API asks of the driver, and the promise of an answer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedcore.params import Float32
from fedcore.wire.messages import Abort, AssignmentAnswer, CheckIn, CheckInAnswer, Receipt

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
    """The connection on which a session waited is gone: do not select a device that cannot hear it."""

    session: str


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


def settle(future: Future[Any], outcome: object) -> None:
    """Answer a future, once, with a value or an exception; whoever asked may have left, or been answered already."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
