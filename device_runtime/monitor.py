"""The monitor of a session: conditions, its hold at the coordinator, and its entry in the owner's journal."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from device_runtime import errors
from device_runtime.conditions import Clock, Conditions, Moment
from device_runtime.config import DeviceConfig
from device_runtime.permission.guard import Guard
from device_runtime.protocol.transport import Transport
from device_runtime.state.records import RUNNING, Entry, Journal, Spending, Spent
from fedcore.wire.messages import Assignment
from fedcore.wire.signatures import Signer

# The hold request: a thread keeps it open while a device works on an assignment and sends nothing else.
#
# Spec: docs/spec/wire.md §6. So the coordinator learns within seconds that a device is gone, and the device that its
# report is no longer needed. A device that finishes at once, or talks to the coordinator anyway, makes no such request.

LONGEST_WAIT_S = 60.0
# A fifth of the time after which the device counts as lost, so that there is time to ask again if a connection breaks.
SHARE = 0.2
# Bounds for any coordinator, so that the thread neither spins nor sleeps for days.
SHORTEST_S, LONGEST_S = 0.05, 3600.0
LEAVING_S = 1.0


@dataclass(frozen=True, slots=True)
class _EnrolledDevice:
    """A device that has enrolled."""

    by: Signer

    def signer(self, transport: Transport) -> Signer:
        return self.by

    def forget(self) -> None:
        """Do nothing: the session's own requests notice it as well."""


class Hold:
    """The hold on an assignment that this device works on, from entry to exit. A no-op without `lost_after_s`."""

    def __init__(self, transport: Transport, assignment: Assignment) -> None:
        self._transport = transport
        self._assignment = assignment.assignment
        self._needed = assignment.lost_after_s is not None
        self._after_s = min(max(SHORTEST_S, SHARE * (assignment.lost_after_s or 0.0)), LONGEST_S)
        # No longer: of a network that goes without a word, the coordinator learns when the next request does not come.
        self._wait_s = min(max(1.0, self._after_s / SHARE), LONGEST_WAIT_S)
        self._entered_at = math.inf
        self._open = False
        self._over = threading.Event()
        self._refused: errors.Refused | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Hold:
        self._entered_at = time.monotonic()
        identity = self._transport.identity
        if self._needed and identity is not None:
            # The state database belongs to this thread, so the other one gets its signer now.
            beside = self._transport.beside(_EnrolledDevice(identity.signer(self._transport)))
            self._thread = threading.Thread(target=self._keep, args=(beside,), name="hold", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            # The coordinator answers an open request at once when the assignment has ended. It may be unreachable.
            self._thread.join(LEAVING_S)

    def check(self) -> None:
        """Raise Refused, one of NOT_WANTED, once the coordinator has said so."""
        if self._refused is not None:
            raise self._refused

    def ask(self) -> None:
        """Ask whether the report is still needed. Raises as `check`; without an answer, the report may be needed."""
        self.check()
        if not self._open:
            try:
                self._transport.hold(self._assignment, 0.0)
            except errors.TransportError as error:
                if isinstance(error, errors.Refused) and error.slug in errors.NOT_WANTED:
                    raise

    def _keep(self, beside: Transport) -> None:
        rest_s = self._after_s
        while not self._over.wait(rest_s):
            silent_s = time.monotonic() - max(self._entered_at, self._transport.spoke_at)
            if silent_s < self._after_s:
                rest_s = min(self._after_s, self._after_s - silent_s)
                continue
            try:
                rest_s = self._ask_once(beside)
            except errors.DeviceError as error:
                if isinstance(error, errors.Refused) and error.final:
                    self._refused = error if error.slug in errors.NOT_WANTED else None
                    return
                # A full coordinator may ask for a longer pause than the time after which it counts the device as lost.
                asked_s = error.after_s if isinstance(error, errors.Refused) else 0.0
                rest_s = max(self._after_s / 2, min(asked_s, 2 * self._after_s))

    def _ask_once(self, beside: Transport) -> float:
        """Keep a request open. Returns the pause after it, in case the coordinator answered at once."""
        began, self._open = time.monotonic(), True
        try:
            beside.hold(self._assignment, self._wait_s)
        finally:
            self._open = False
        return max(0.0, self._after_s - (time.monotonic() - began))


class SessionRecord:
    """Outcome, journal entry and spending of one session. The entry is written when the record is made."""

    def __init__(
        self, journal: Journal, spending: Spending, transport: Transport, coordinator: str, population: str
    ) -> None:
        self.outcome = errors.Outcome()
        self._journal = journal
        self._spending = spending
        self._counted = Spent()
        self._transport = transport
        self._public: str | None = None
        self._number, self._entry = journal.open(coordinator, population)

    def note(self, **facts: Any) -> None:
        """Add to the outcome."""
        self.outcome = replace(self.outcome, **facts)

    def notice(self, kind: str, words: str) -> None:
        """Tell the owner about something else than the session's end, also in the journal. Raises StateError."""
        self.note(notices=(*self.outcome.notices, words))
        self._journal.remark(kind, words)

    def know(self, **facts: Any) -> None:
        """Add to the journal's entry. The next write stores it."""
        self._entry = replace(self._entry, **facts)

    def write(self, **facts: Any) -> None:
        """Add to the journal's entry, and store it. Raises StateError."""
        self.know(**facts)
        entry = replace(self._merged(), outcome=RUNNING)
        self._count(entry)
        self._journal.write(self._number, entry)

    def fail(self, error: errors.DeviceError) -> None:
        """The session ends with this error."""
        self.outcome = errors.failed(self.outcome, error)
        # The private part of an error may quote a path or a value, and the journal may be shown to others.
        self._public = str(error) if isinstance(error, errors.NotAllowedNow) else error.detail

    def close(self, **facts: Any) -> errors.Outcome:
        """Write the entry, with `facts` added, for the last time. A failure becomes a notice."""
        entry = replace(self._merged(), **facts)
        self.note(bytes_up=entry.bytes_up, bytes_down=entry.bytes_down)
        try:
            self._count(entry)
            self._journal.close(self._number, entry)
        except errors.StateError as error:
            self.note(notices=(*self.outcome.notices, f"the journal lacks the end of this session: {error}"))
        return self.outcome

    def _count(self, entry: Entry) -> None:
        """Add the use since the last call to the day's spending."""
        before, now = self._counted, Spent(entry.compute_s, entry.bytes_up + entry.bytes_down)
        if now != before:
            self._spending.add(Spent(now.seconds - before.seconds, now.bytes - before.bytes))
            self._counted = now

    def _merged(self) -> Entry:
        facts = {name: getattr(self.outcome, name) for name in errors.SessionFacts.__struct_fields__}
        if self._public is not None:
            facts["detail"] = self._public
        facts |= {"bytes_up": self._transport.bytes_up, "bytes_down": self._transport.bytes_down}
        return replace(self._entry, **facts)


# Reading conditions costs more than a small model's step, so in training they are read no more often than this.
LOOK_EVERY_S = 0.1
# How often progress is written into the journal: after a kill, at most this much of a day's use is uncounted.
NOTE_EVERY_S = 2.0


class Monitor:
    """Everything that may stop the work of one session: conditions, the guard's limits, the deadline, the coordinator.

    hold: the hold request of the current assignment, if there is one.
    """

    def __init__(self, config: DeviceConfig, clock: Clock, guard: Guard, record: SessionRecord) -> None:
        self.hold: Hold | None = None
        self._config = config
        self._clock = clock
        self._guard = guard
        self._record = record
        self._conditions_failed = False
        self._look_at, self._note_at = 0.0, time.monotonic() + NOTE_EVERY_S

    def conditions(self) -> Conditions:
        """The current conditions. If the application's source fails, all are unknown, and a notice says so."""
        try:
            now = self._config.conditions()
            if not isinstance(now, Conditions):
                raise TypeError(f"it gave {type(now).__name__}, not Conditions")
        except Exception as error:
            if not self._conditions_failed:
                words = f"the source of conditions failed, so none is known: {type(error).__name__}: {error}"
                self._record.note(notices=(*self._record.outcome.notices, words))
            self._conditions_failed = True
            return Conditions()
        return now

    def keep_going(self, due: Moment | None = None) -> bool:
        """Whether limits and deadline let the work continue. Called between steps; also keeps the journal up to date.

        due: the deadline, if there is one. Raises NotAllowedNow when a condition for work no longer holds, and Refused
        when the report is not needed.
        """
        if self.hold is not None:
            self.hold.check()
        now = time.monotonic()
        if now >= self._look_at:
            unmet = self._config.unmet(self.conditions())
            if unmet:
                raise errors.NotAllowedNow("a condition for work no longer holds", "; ".join(unmet))
            self._look_at = now + LOOK_EVERY_S
        if now >= self._note_at:
            self._record.write(compute_s=self._guard.seconds)
            self._note_at = now + NOTE_EVERY_S
        return self._guard.may_go_on() and (due is None or due.remaining_s(self._clock) > 0)
