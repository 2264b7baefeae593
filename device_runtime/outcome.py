"""The outcome of a session, in words and numbers, and the seconds of each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from device_runtime.errors import DeviceError, Refused
from fedcore.wire.messages import RetryWindow

Phase: TypeAlias = Literal["start", "wait", "fetch", "train", "mask", "upload"]
"""start: opening state, engine and examples, and anything outside the other phases. wait: for an assignment. fetch: of
plan, graphs and checkpoint. train: loading and running graphs. mask: sharing secrets and masking the report. upload:
from the first byte of a report or of a secure-aggregation message to the answer, including waits for other devices.
"""


class Phases:
    """A stopwatch of phases: an inner phase stops the outer one. `seconds` are wall time, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._phase: Phase = "start"
        self._since = time.monotonic()

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Count the time inside the block to this phase."""
        outer = self._phase
        self._turn(phase)
        try:
            yield
        finally:
            self._turn(outer)

    def stop(self) -> dict[Phase, float]:
        """Stop, and return the seconds of every phase."""
        self._turn(self._phase)
        return dict(self.seconds)

    def _turn(self, phase: Phase) -> None:
        now = time.monotonic()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a session that outcome and journal share.

    `task` is empty when there was no assignment, and `model NAME` where a model became personal. `cut`: texts that were
    longer than the plan's tokens.
    """

    outcome: str
    reason: str = ""
    detail: str = ""
    task: str = ""
    round: int = 0
    attempt: int = 0
    examples: int = 0
    steps: int = 0
    cut: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class Outcome(SessionFacts, frozen=True, kw_only=True):
    """The end of a session.

    reported: the report was counted. rejected: no work now. not-needed: the round ended first. not-now: a condition
    under which this device may work does not hold, and nothing was sent. aborted: the device gave its assignment up.
    failed: the rest. `reason` is the coordinator's, or an AbortReason, or one of errors.py.
    `retryable`: if the report was not counted, whether a retry within minutes is useful. `notices` tell the device's
    owner of repairs and losses: a damaged state database, a report that came too late.
    `phases` are seconds of wall time (phases.py), `seconds` their sum.
    `arch` is the machine's own name of its architecture, `backend` the engine that runs graphs.
    """

    outcome: Literal["reported", "rejected", "aborted", "not-needed", "not-now", "failed"] = "failed"
    arch: str = ""
    backend: str = ""
    device: str = ""
    slot: int = 0
    seconds: float = 0.0
    phases: dict[Phase, float] = {}
    retry: RetryWindow | None = None
    retryable: Literal["transient", "permanent"] | None = None
    notices: tuple[str, ...] = ()


def failed(outcome: Outcome, error: DeviceError) -> Outcome:
    """The outcome after an error that the session could not handle."""
    outcome = replace(
        outcome,
        outcome="failed",
        reason=error.reason,
        detail=str(error),
        retryable="permanent" if error.permanent else "transient",
    )
    if not isinstance(error, Refused):
        return outcome
    return replace(outcome, outcome="not-needed" if error.status == 410 else "failed", retry=error.retry)
