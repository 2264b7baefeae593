"""Errors of the device runtime, and the outcome of a session, in words and numbers.

DeviceError
├── ConfigError             the configuration, or the policy file, is not one
├── PolicyForbids           this device's policy does not let it take part now; the coordinator was not called
├── AssignmentError         this device cannot carry out the assignment; the coordinator is told `reason`
│   ├── ExamplesError       local examples are missing, too few, or do not fit the plan
│   │   └── StoreDamaged    the example store was damaged; it is kept aside, and a new one was made
│   ├── PlanRefused         the plan or one of its graphs cannot be run here, now or later
│   ├── NotAllowedNow       a condition under which this device may work failed, or its owner stopped it
│   ├── SecaggRefused       this device refused a step of a secure aggregation, or cannot go on with it
│   │   └── SumAbandoned    the aggregation ended without a sum
│   ├── AlreadyRevealed     this device revealed shares in another attempt at the round
│   ├── NonFiniteReport     the report holds an infinity or NaN: training diverged, say
│   └── RuntimeFailed       a graph failed while it ran
│       └── DeadlinePassed  the coordinator stopped waiting before the work was done
├── ModelError              a model cannot be used as the app asks
│   ├── ModelRefused        a release of a model, or what it names, cannot be used here; the last version stays
│   ├── NoModel             no version of the model is here yet
│   ├── InputRefused        the examples do not fit the model's inputs
│   └── ModelClosed         the app has closed the model
├── ExampleRefused          an example does not fit its collection's declaration, or no plan could train on it
├── StoreError              the example store cannot be used: no space, no permission, locked
├── KeyUnavailable          a key of the platform, to seal or to attest, is not available
├── StateError              the state folder cannot be used
│   ├── StateInUse          another process runs a session with this state folder
│   ├── StateDamaged        the state database does not hold what it should
│   ├── SealBroken          sealed bytes were changed, or sealed under another key
│   └── ReportLost          a finished report is gone or was changed before it was counted
└── TransportError          talking to the coordinator failed
    ├── Unreachable         no complete answer arrived in any attempt
    ├── BadAnswer           the answer does not follow the protocol, or is not the requested bytes
    └── Refused             the coordinator answered with a problem
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from fedcore.errors import visible
from fedcore.wire.messages import AbortReason, RetryWindow

# These name things that a coordinator keeps only for a while: it may have restarted, or the round may be over.
NOT_WANTED = frozenset({"no-longer-needed", "too-stale"})
PASSING = frozenset({"unknown-session", "unknown-assignment", "unknown-blob", "conflicting-report"}) | NOT_WANTED
# These are about a request's signer and time of signing, not about the request.
ABOUT_SIGNATURES = frozenset({"stale-signature", "replayed-signature", "unknown-device"})


# Exceptions that tell a process to end: Ctrl-C, and an application's handler of SIGTERM.
STOPS = (KeyboardInterrupt, SystemExit)

# The most characters of a foreign text that are kept and shown.
MOST_SHOWN = 500


def plain(text: str) -> str:
    """A foreign text that is safe to keep and print: made visible, and at most MOST_SHOWN characters."""
    escaped = visible(text[:MOST_SHOWN])
    return escaped if len(text) <= MOST_SHOWN >= len(escaped) else f"{escaped[:MOST_SHOWN]}…"


class DeviceError(Exception):
    """Base of every error raised by `device_runtime`.

    `reason` is its name in an outcome; `permanent` says that retrying within minutes is useless. The journal keeps
    `detail`. The private part, which may hold paths or an engine's words about the data, is only in the outcome. The
    coordinator receives neither.
    """

    reason: str
    permanent: bool = False

    def __init__(self, detail: str, private: str = "") -> None:
        super().__init__(f"{detail}: {private}" if private else detail)
        self.detail = detail
        self.private = private


class ConfigError(DeviceError):
    """The configuration names something that is not there, or the policy file is not a policy."""

    reason = "bad-configuration"
    permanent = True


class PolicyForbids(DeviceError):
    """This device's policy does not let it take part now; the coordinator was not called."""

    reason = "policy"
    permanent = True


class AssignmentError(DeviceError):
    """This device cannot carry out the assignment; the coordinator is told `reason`.

    Its text may quote a plan, or an engine that quotes one, so it is `plain`.
    """

    reason: AbortReason
    permanent = True

    def __init__(self, detail: str, private: str = "") -> None:
        super().__init__(plain(detail), plain(private))


class ExamplesError(AssignmentError):
    """Local examples are missing, too few, or do not fit the plan."""

    def __init__(self, reason: AbortReason, detail: str, private: str = "") -> None:
        super().__init__(detail, private)
        self.reason = reason


class StoreDamaged(ExamplesError):
    """The example store was damaged; it is `kept` aside, and a new one was made in its place."""

    def __init__(self, kept: Path) -> None:
        detail = "the example store was damaged; it is kept aside, and a new one was made"
        super().__init__("invalid-examples", detail, str(kept))
        self.kept = kept


class PlanRefused(AssignmentError):
    """The plan or one of its graphs cannot be run here, now or later."""

    reason = "plan-refused"


class NotAllowedNow(AssignmentError):
    """A condition under which this device may work failed, or its owner stopped it."""

    reason = "conditions"
    permanent = False


class SecaggRefused(AssignmentError):
    """This device refused a step of a secure aggregation, or cannot continue it. It reveals no more shares."""

    reason = "secagg-refused"
    permanent = False


class AlreadyRevealed(AssignmentError):
    """This device revealed shares in another attempt at the round: the difference of two sums could be its report."""

    reason = "already-revealed"
    permanent = False


class SumAbandoned(SecaggRefused):
    """The aggregation ended without a sum: the round does not count."""


class NonFiniteReport(AssignmentError):
    """The report holds an infinity or NaN; the message says where that began."""

    reason = "non-finite-report"
    permanent = False


class RuntimeFailed(AssignmentError):
    """A graph failed while it ran."""

    reason = "runtime-failed"
    permanent = False


class DeadlinePassed(RuntimeFailed):
    """The coordinator stopped waiting before the work was done."""


class ModelError(DeviceError):
    """A model cannot be used as the app asks."""

    permanent = True


class ModelRefused(ModelError):
    """A release of a model, or what it names, cannot be used here; the last version stays.

    Its text may quote a plan or an engine, so it is `plain`.
    """

    reason = "model-refused"

    def __init__(self, detail: str, private: str = "") -> None:
        super().__init__(plain(detail), plain(private))


class NoModel(ModelError):
    """No version of the model is here yet: `refresh` fetches one, if there is one for this device."""

    reason = "no-model"
    permanent = False


class InputRefused(ModelError):
    """The examples do not fit the model's inputs: a name, a shape, a type, or a value outside 0 … high − 1."""

    reason = "input-refused"


class ModelClosed(ModelError):
    """The app has closed the model."""

    reason = "model-closed"


class ExampleRefused(DeviceError):
    """An example does not fit its collection's declaration, or no plan could train on it."""

    reason = "example-refused"
    permanent = True


class StoreError(DeviceError):
    """The example store cannot be used: no space, no permission, locked."""

    reason = "store-unusable"


class KeyUnavailable(DeviceError):
    """A key of the platform, to seal or to attest, is not available now. The device gives nothing up because of it."""

    reason = "key-unavailable"


class StateError(DeviceError):
    """The state folder cannot be used."""

    reason = "state-unusable"


class StateInUse(StateError):
    """Another process runs a session with this state folder."""

    reason = "state-in-use"


class StateDamaged(StateError):
    """The state database does not hold what it should; the next session sets it aside."""


class SealBroken(StateError):
    """Sealed bytes were changed, or sealed under another key."""


class ReportLost(StateError):
    """A finished report is gone or was changed before it was counted."""

    reason = "report-lost"


class TransportError(DeviceError):
    """Talking to the coordinator failed. Its text may quote an answer, so it is `plain`."""

    def __init__(self, detail: str) -> None:
        super().__init__(plain(detail))


class Unreachable(TransportError):
    """No complete answer arrived in any attempt."""

    reason = "unreachable"


class BadAnswer(TransportError):
    """The answer does not follow the protocol, or is not the requested bytes."""

    reason = "bad-answer"

    def __init__(self, detail: str, *, permanent: bool = False) -> None:
        super().__init__(detail)
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class RefusalHints:
    """The parts of a refusal besides its problem: a retry window, Retry-After in seconds, and its Date, if any."""

    retry: RetryWindow | None = None
    after_s: float = 0.0
    their_time: float | None = None


class Refused(TransportError):
    """The coordinator answered with a problem: its `status`, its registered `slug`, and when to return, if stated.

    Permanent: a fault of the request or of this installation, which does not pass. Final: the same request would be
    refused again, as after the end of a round. `their_time` is the coordinator's, in seconds since 1970.
    """

    def __init__(self, status: int, slug: str, detail: str, hints: RefusalHints | None = None) -> None:
        super().__init__(detail)
        hints = hints or RefusalHints()
        self.status = status
        self.reason = self.slug = plain(slug)
        self.retry = hints.retry
        self.after_s = hints.after_s
        self.their_time = hints.their_time
        client_fault = 400 <= status < 500 and status not in {408, 429}
        self.permanent = (client_fault and slug not in PASSING | ABOUT_SIGNATURES) or status == 501
        self.final = client_fault and slug not in ABOUT_SIGNATURES


# The outcome of a session, in words and numbers, and the seconds of each phase.


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

    `task` is empty when there was no assignment, and `model NAME` where a model became personal. `target`: the task's
    expression on labels, safe to show. `cut`: texts that were longer than the plan's tokens.
    """

    outcome: str
    reason: str = ""
    detail: str = ""
    task: str = ""
    round: int = 0
    attempt: int = 0
    target: str = ""
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
