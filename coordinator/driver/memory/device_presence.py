"""Presence of devices in running rounds: their open requests, and when each was last heard of.

Spec: docs/spec/rounds.md §4. Only in memory. The driver's thread and the event loop both use it.

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
from typing import NamedTuple

from coordinator.commands import settle
from coordinator.errors import NoLongerNeeded
from coordinator.rules.states import broken_after_s
from fedcore.wire.messages import Assignment

_LOOK_S = 0.25
_STALL_S = 1.0
"""After this long without a look, this process stood still: it has not yet read the requests since then."""


class Silence(NamedTuple):
    """How many devices of a round are not heard of, and since when the first of them is not, on its clock."""

    devices: int = 0
    since: float | None = None


@dataclass(slots=True)
class _OpenAssignment:
    """An assignment that is open. `due` is when it is lost, unless a request is open by then.

    given_up: it is lost, whatever its device still asks.
    """

    round_id: int
    lost_after_s: float
    heard_at: float
    due: float
    open: int = 0
    given_up: bool = False
    holds: set[Future[None]] = field(default_factory=set)


class Presence:
    """The open assignments of this process's rounds. Safe from any thread. clock: seconds, with any origin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._assignments: dict[str, _OpenAssignment] = {}
        self._rounds: defaultdict[int, set[str]] = defaultdict(set)
        self._looked_at = clock()

    def expect(self, round_id: int, assignment: Assignment) -> None:
        """An assignment of a round was given."""
        now, lost_after = self._clock(), assignment.lost_after_s or math.inf
        with self._lock:
            self._assignments[assignment.assignment] = _OpenAssignment(round_id, lost_after, now, now + lost_after)
            self._rounds[round_id].add(assignment.assignment)

    def is_open(self, assignment: str) -> bool:
        """Whether a running round of this process waits for an assignment."""
        return assignment in self._assignments

    def begin(self, assignment: str) -> None:
        """A request about an assignment has come, and is open until `end`."""
        with self._lock:
            if assignment in self._assignments:
                self._assignments[assignment].open += 1

    def end(self, assignment: str, *, broken: bool) -> None:
        """A request about an assignment is over; `broken` says that its connection was lost."""
        now = self._clock()
        with self._lock:
            open_ = self._assignments.get(assignment)
            if open_ is None:
                return
            open_.open = max(0, open_.open - 1)
            open_.heard_at = now
            open_.due = now + (broken_after_s(open_.lost_after_s) if broken else open_.lost_after_s)

    def heard(self, assignment: str) -> None:
        """A device asked about its assignment and was sent away, because this process has too much to do."""
        with self._lock:
            open_ = self._assignments.get(assignment)
            if open_ is not None:
                open_.heard_at = self._clock()
                open_.due = max(open_.due, open_.heard_at + open_.lost_after_s)

    def give_up(self, assignment: str) -> None:
        """Stop waiting for a device: its assignment is lost from now on."""
        with self._lock:
            if assignment in self._assignments:
                self._assignments[assignment].given_up = True

    def hold(self, assignment: str) -> Future[None]:
        """A future that fails with NoLongerNeeded as soon as the round needs nothing more of an assignment.

        An older one of the same assignment gets its result now, None: no device keeps more than one request open by
        this. Give it back with `release`. Raises NoLongerNeeded when the round needs nothing more of it now.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # so that no waiting task can cancel it while another thread settles it
        with self._lock:
            if assignment not in self._assignments:
                raise _over()
            open_ = self._assignments[assignment]
            older, open_.holds = open_.holds, {future}
        for earlier in older:
            settle(earlier, None)
        return future

    def release(self, assignment: str, future: Future[None]) -> None:
        """A future of `hold` is not waited for any more."""
        with self._lock:
            if assignment in self._assignments:
                self._assignments[assignment].holds.discard(future)

    def dismiss(self) -> None:
        """Settle every future of `hold` with None now: the devices may ask again."""
        with self._lock:
            holds = [future for open_ in self._assignments.values() for future in open_.holds]
        for future in holds:
            settle(future, None)

    def hand_over(self, ended: int, successor: int) -> None:
        """The open assignments of a round that ended are those of its successor from now on."""
        with self._lock:
            names = self._rounds.pop(ended, set())
            for name in names:
                self._assignments[name].round_id = successor
                self._rounds[successor].add(name)

    def forget(self, assignments: Iterable[str], refusal: NoLongerNeeded | None = None) -> None:
        """Drop assignments that have ended, and tell the devices that hold them, with `refusal` if there is one."""
        holds: list[Future[None]] = []
        with self._lock:
            for assignment in assignments:
                open_ = self._assignments.pop(assignment, None)
                if open_ is not None:
                    holds += open_.holds
                    self._rounds[open_.round_id].discard(assignment)
                    if not self._rounds[open_.round_id]:
                        del self._rounds[open_.round_id]
        for future in holds:
            settle(future, refusal or _over())

    def forget_all_but(self, round_ids: Collection[int]) -> None:
        """Drop the assignments of all rounds but these."""
        with self._lock:
            ended = [name for round_id, names in self._rounds.items() if round_id not in round_ids for name in names]
        self.forget(ended)

    def lost(self) -> dict[int, list[str]]:
        """The assignments that are lost by now, by round; the caller drops them with `forget`.

        Time in which this was not called does not count: this process stood still, and read no request.
        """
        now = self._clock()
        with self._lock:
            away_s = now - self._looked_at
            if away_s < _LOOK_S:
                return {}
            self._looked_at = now
            if away_s > _STALL_S:
                for open_ in self._assignments.values():
                    open_.due += away_s
            lost: defaultdict[int, list[str]] = defaultdict(list)
            for assignment, open_ in self._assignments.items():
                if open_.given_up or (not open_.open and open_.due <= now):
                    lost[open_.round_id].append(assignment)
        return dict(lost)

    def silence(self, round_id: int, least_s: float) -> Silence:
        """The devices of a round that have had no request open for more than `least_s`."""
        now = self._clock()
        with self._lock:
            in_round = [self._assignments[name] for name in self._rounds.get(round_id, ())]
            silent = [open_.heard_at for open_ in in_round if not open_.open and now - open_.heard_at > least_s]
        return Silence(len(silent), min(silent, default=None))


def _over() -> NoLongerNeeded:
    return NoLongerNeeded("the round has what it needs of this assignment, or is over")
