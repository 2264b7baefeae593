"""Which devices of the rounds that run are there: their open requests, and when each was heard of last.

Spec: docs/spec/rounds.md §4. In memory alone. The driver's thread and the event loop both use it.

A device is there as long as a request about its assignment is open. Without one it has `lost_after_s` to make the next,
and less when the connection broke: a process that is killed closes its connections, and so does a proxy that restarts,
but behind the proxy the device asks again at once.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from coordinator.commands import settle
from coordinator.errors import NoLongerNeeded
from fedcore.wire.messages import Assignment

_LEAST_S, _CONTACTS_PER_S = 5.0, 100.0
_BROKEN_S, _BROKEN_SHARE = 2.0, 0.25
"""How long a device has to ask again after its connection broke: a share of `lost_after_s`, and so much at least."""
_LOOK_S = 0.25
_STALL_S = 1.0
"""So long without a look, and this process stood still: what devices said meanwhile is not read yet."""


def lost_after_s(devices: int) -> float:
    """After how many seconds of silence a device of a round of so many is lost.

    It grows with the round, so that all of its devices together make no more requests than one process answers.
    """
    return _LEAST_S + devices / _CONTACTS_PER_S


@dataclass(frozen=True, slots=True)
class Silence:
    """How many devices of a round are not heard of, and since when the first of them is not, on the book's clock."""

    devices: int = 0
    since: float | None = None


@dataclass(slots=True)
class _Seat:
    """An assignment that is open. `due` is when it is lost, unless a request is open by then."""

    round_id: int
    lost_after_s: float
    heard_at: float
    due: float
    open: int = 0
    holds: set[Future[None]] = field(default_factory=set)

    @property
    def broken_after_s(self) -> float:
        """After how many seconds without a request it is lost, once its connection broke."""
        return min(max(_BROKEN_S, _BROKEN_SHARE * self.lost_after_s), self.lost_after_s)


class Presence:
    """The open assignments of this process's rounds. Safe from any thread. clock: seconds, from anywhere."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seats: dict[str, _Seat] = {}
        self._rounds: defaultdict[int, set[str]] = defaultdict(set)
        self._looked_at = clock()

    def expect(self, round_id: int, given: Assignment) -> None:
        """An assignment of a round was given."""
        now, lost_after = self._clock(), given.lost_after_s or math.inf
        with self._lock:
            self._seats[given.assignment] = _Seat(round_id, lost_after, now, now + lost_after)
            self._rounds[round_id].add(given.assignment)

    def begin(self, assignment: str) -> None:
        """A request about an assignment has come, and is open until `end`."""
        with self._lock:
            if assignment in self._seats:
                self._seats[assignment].open += 1

    def end(self, assignment: str, *, broken: bool) -> None:
        """A request about an assignment is over; `broken` says that its connection was lost."""
        now = self._clock()
        with self._lock:
            seat = self._seats.get(assignment)
            if seat is None:
                return
            seat.open = max(0, seat.open - 1)
            seat.heard_at = now
            seat.due = now + (seat.broken_after_s if broken else seat.lost_after_s)

    def heard(self, assignment: str) -> None:
        """A device asked about its assignment and was sent away, because this process has too much to do."""
        with self._lock:
            seat = self._seats.get(assignment)
            if seat is not None:
                seat.heard_at = self._clock()
                seat.due = max(seat.due, seat.heard_at + seat.lost_after_s)

    def hold(self, assignment: str) -> Future[None]:
        """A promise that fails with NoLongerNeeded as soon as the round needs nothing more of an assignment.

        It takes the place of an older one, which is kept: no device holds more than one request open by this. Give it
        back with `let_go`. Raises NoLongerNeeded when the round needs nothing more of it now.
        """
        promise: Future[None] = Future()
        promise.set_running_or_notify_cancel()  # so that whoever waits cannot cancel it while another thread keeps it
        with self._lock:
            if assignment not in self._seats:
                raise _over()
            seat = self._seats[assignment]
            older, seat.holds = seat.holds, {promise}
        for one in older:
            settle(one, None)
        return promise

    def let_go(self, assignment: str, promise: Future[None]) -> None:
        """Nobody waits for a promise of `hold` any more."""
        with self._lock:
            if assignment in self._seats:
                self._seats[assignment].holds.discard(promise)

    def dismiss(self) -> None:
        """Keep every promise now: nobody is told anything, and whoever waited may ask again."""
        with self._lock:
            holds = [promise for seat in self._seats.values() for promise in seat.holds]
        for promise in holds:
            settle(promise, None)

    def forget(self, assignments: Iterable[str]) -> None:
        """These assignments have ended, however: whoever holds one is told."""
        promises: list[Future[None]] = []
        with self._lock:
            for assignment in assignments:
                seat = self._seats.pop(assignment, None)
                if seat is not None:
                    promises += seat.holds
                    self._rounds[seat.round_id].discard(assignment)
                    if not self._rounds[seat.round_id]:
                        del self._rounds[seat.round_id]
        for promise in promises:
            settle(promise, _over())

    def forget_all_but(self, round_ids: Collection[int]) -> None:
        """Every round but these is over."""
        with self._lock:
            ended = [name for round_id, names in self._rounds.items() if round_id not in round_ids for name in names]
        self.forget(ended)

    def lost(self) -> dict[int, list[str]]:
        """The assignments that are lost by now, by round; whoever asks takes them out, with `forget`.

        Time in which nobody asked does not count: this process stood still, and read nothing of what devices said.
        """
        now = self._clock()
        with self._lock:
            away_s = now - self._looked_at
            if away_s < _LOOK_S:
                return {}
            self._looked_at = now
            if away_s > _STALL_S:
                for seat in self._seats.values():
                    seat.due += away_s
            found: defaultdict[int, list[str]] = defaultdict(list)
            for assignment, seat in self._seats.items():
                if not seat.open and seat.due <= now:
                    found[seat.round_id].append(assignment)
        return dict(found)

    def silence(self, round_id: int, least_s: float) -> Silence:
        """The devices of a round that have had no request open for more than `least_s`."""
        now = self._clock()
        with self._lock:
            seats = [self._seats[name] for name in self._rounds.get(round_id, ())]
            silent = [seat.heard_at for seat in seats if not seat.open and now - seat.heard_at > least_s]
        return Silence(len(silent), min(silent, default=None))


def _over() -> NoLongerNeeded:
    return NoLongerNeeded("the round has what it needs of this assignment, or is over")
