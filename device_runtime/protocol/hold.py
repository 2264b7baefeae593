"""The hold request: a thread keeps it open while a device works on an assignment and sends nothing else.

Spec: docs/spec/wire.md §6. So the coordinator learns within seconds that a device is gone, and the device that its
report is no longer needed. A device that finishes at once, or talks to the coordinator anyway, makes no such request.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from device_runtime.errors import NOT_WANTED, DeviceError, Refused, TransportError
from device_runtime.protocol.transport import Transport
from fedcore.wire.messages import Assignment
from fedcore.wire.signatures import Signer

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
        self._refused: Refused | None = None
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
            except TransportError as error:
                if isinstance(error, Refused) and error.slug in NOT_WANTED:
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
            except DeviceError as error:
                if isinstance(error, Refused) and error.final:
                    self._refused = error if error.slug in NOT_WANTED else None
                    return
                # A full coordinator may ask for a longer pause than the time after which it counts the device as lost.
                asked_s = error.after_s if isinstance(error, Refused) else 0.0
                rest_s = max(self._after_s / 2, min(asked_s, 2 * self._after_s))

    def _ask_once(self, beside: Transport) -> float:
        """Keep a request open. Returns the pause after it, in case the coordinator answered at once."""
        began, self._open = time.monotonic(), True
        try:
            beside.hold(self._assignment, self._wait_s)
        finally:
            self._open = False
        return max(0.0, self._after_s - (time.monotonic() - began))
