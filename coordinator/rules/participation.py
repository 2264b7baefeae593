"""Participation: which devices must not take part in a task yet. In memory, without clock or store."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from coordinator.rules.task_settings import Separation


class Participation(NamedTuple):
    """The last participation of a device: when it was assigned, on the driver's clock, and in which round."""

    device: str
    at: float
    number: int


class Participations:
    """A task's participations, as far back as its separation asks.

    A participation is an assignment in a committed round, unless the device gave it up or was lost; so long as the
    round runs, it counts too. A device that is left out of further attempts at a round took part in that round, as
    somebody may know a sum with its report. Only the driver's thread changes them; other threads may read.
    """

    def __init__(self, separation: Separation, committed: int, earlier: Iterable[Participation] = ()) -> None:
        """`committed` is the number of the last committed round; participations in a later one are of one that runs."""
        last = {participation.device: participation for participation in earlier}
        self._separation = separation
        self._committed = committed
        self._last = {device: taken for device, taken in last.items() if taken.number <= committed}
        self._running = {device: taken for device, taken in last.items() if taken.number > committed}
        self._left_out: AbstractSet[str] = frozenset()

    def add(self, devices: Iterable[str], now: float) -> None:
        """Add devices to the round that runs."""
        self._running |= {device: Participation(device, now, self._committed + 1) for device in devices}

    def leave(self, device: str) -> None:
        """Drop a device that gave its assignment up, or was lost."""
        self._running.pop(device, None)

    def leave_out(self, devices: AbstractSet[str]) -> None:
        """Take these devices, and no others, for those left out of further attempts at the round that is next."""
        self._left_out = devices

    def end(self, now: float, *, committed: bool, going_on: AbstractSet[str] = frozenset()) -> None:
        """End the round that ran. going_on: devices whose assignments go on in the next one, which is buffered."""
        working = {device: taken for device, taken in self._running.items() if device in going_on}
        if committed:
            over = {device: taken for device, taken in self._running.items() if device not in going_on}
            candidates = {**self._last, **{device: self._in_next(device, now) for device in self._left_out}, **over}
            self._committed += 1
            number = self._committed + 1
            self._last = {device: taken for device, taken in candidates.items() if self._is_resting(taken, now, number)}
            self._left_out = frozenset()
        self._running = working

    def is_resting(self, device: str, now: float, rounds_before: int | None = None) -> bool:
        """Whether a device may not yet be drawn for a round.

        rounds_before: how many other rounds, which have not ended, come before it; by default, as many as run.
        """
        last = self._participation(device, now)
        if rounds_before is None:
            # Behind a round that runs there is only the one after it.
            rounds_before = 1 if self._running else 0
        return last is not None and self._is_resting(last, now, self._committed + 1 + rounds_before)

    def remaining(self, device: str, now: float) -> tuple[float, int]:
        """Seconds and committed rounds until a device may take part again; both at least 0."""
        last = self._participation(device, now)
        if last is None:
            return 0.0, 0
        rounds = last.number + self._separation.rounds - 1 - self._committed
        return max(0.0, last.at + self._separation.seconds - now), max(0, rounds)

    def _participation(self, device: str, now: float) -> Participation | None:
        if device in self._left_out:
            return self._in_next(device, now)
        return self._running.get(device) or self._last.get(device)

    def _in_next(self, device: str, now: float) -> Participation:
        return Participation(device, now, self._committed + 1)

    def _is_resting(self, last: Participation, now: float, number: int) -> bool:
        return now < last.at + self._separation.seconds or number < last.number + self._separation.rounds
