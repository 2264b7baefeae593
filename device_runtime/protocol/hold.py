"""The hold request: a thread keeps it open while a device works on an assignment and sends nothing else.

Spec: docs/spec/wire.md §6. So the coordinator knows within seconds that a device is gone, and the device that its
report is needed no more. A device that is done at once, or talks to the coordinator anyway, makes no such request.
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
# A fifth of the time after which the device is lost: long enough to ask again, should a connection break.
SHARE = 0.2
# Bounds for any coordinator: no thread that spins, none that sleeps for days.
SHORTEST_S, LONGEST_S = 0.05, 3600.0
LEAVING_S = 1.0


@dataclass(frozen=True, slots=True)
class _EnrolledDevice:
    """A device that has enrolled."""

    by: Signer

    def signer(self, transport: Transport) -> Signer:
        return self.by

    def forget(self) -> None:
        """The session's own requests find out as well."""


class Hold:
    """An assignment that this device works on, from entry to exit. Without a `lost_after_s` there is nothing to do."""

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
            # The coordinator answers at once what is open about an assignment that has ended. It may be out of reach.
            self._thread.join(LEAVING_S)

    def check(self) -> None:
        """Raise Refused, one of NOT_WANTED, once the coordinator has said so."""
        if self._refused is not None:
            raise self._refused

    def ask(self) -> None:
        """Find out whether the report is still needed. Raises what `check` does; without an answer, it may be."""
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
                # A coordinator that is full may ask for more patience than it has itself.
                asked_s = error.after_s if isinstance(error, Refused) else 0.0
                rest_s = max(self._after_s / 2, min(asked_s, 2 * self._after_s))

    def _ask_once(self, beside: Transport) -> float:
        """Keep a request open; how long to rest after it, should the coordinator not have held it back."""
        began, self._open = time.monotonic(), True
        try:
            beside.hold(self._assignment, self._wait_s)
        finally:
            self._open = False
        return max(0.0, self._after_s - (time.monotonic() - began))
