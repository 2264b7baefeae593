"""The monitor of a session: it reads conditions, and decides whether work may continue."""

from __future__ import annotations

import time

from device_runtime.clock import Clock, Moment
from device_runtime.conditions import Conditions
from device_runtime.config import DeviceConfig
from device_runtime.errors import NotAllowedNow
from device_runtime.permission.guard import Guard
from device_runtime.protocol.hold import Hold
from device_runtime.record import SessionRecord

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
                raise NotAllowedNow("a condition for work no longer holds", "; ".join(unmet))
            self._look_at = now + LOOK_EVERY_S
        if now >= self._note_at:
            self._record.write(compute_s=self._guard.seconds)
            self._note_at = now + NOTE_EVERY_S
        return self._guard.may_go_on() and (due is None or due.remaining_s(self._clock) > 0)
