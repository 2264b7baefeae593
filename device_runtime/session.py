"""One session: check in, wait to be selected, do the work, upload once. Spec: docs/spec/wire.md."""

from __future__ import annotations

import contextlib
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
from msgspec.structs import replace

from device_runtime.backends import BACKENDS, FORMATS
from device_runtime.backends.backend import Backend
from device_runtime.cache import BlobCache
from device_runtime.errors import (
    AssignmentError,
    ConfigError,
    DeviceError,
    PlanRefused,
    Refused,
    TransportError,
)
from device_runtime.examples import ExampleSource, open_examples
from device_runtime.identity import device_id
from device_runtime.runner import Result, execute
from device_runtime.state import only_session
from device_runtime.transport import Transport
from fedcore import checkpoint
from fedcore.batching import Place
from fedcore.errors import FedcoreError
from fedcore.plan import Plan
from fedcore.wire.messages import Abort, Assignment, CheckIn, Rejected, RetryWindow

# Answers to an upload after which there is no assignment left to give up: unknown, decided, too late.
OVER = frozenset({404, 409, 410})

# When to come back where the coordinator did not say; after a report at once, as it says so at the next check-in.
AFTER_WORK = RetryWindow(0.0, 2.0)
MINUTES = RetryWindow(60.0, 300.0)
HOURS = RetryWindow(2 * 3600.0, 6 * 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """One device. `state` is a folder of its own; `wait_s` is how long it waits to be selected."""

    coordinator: str
    population: str
    examples: Path
    state: Path
    backend: str = "onnxruntime"
    wait_s: float = 30.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a session ended, as far as it came; `task` is empty when there was no assignment.

    arch is the machine's architecture as it names itself, backend what runs graphs on it.

    reported: the report was counted. rejected: no work now. not-needed: the round ended first. aborted: the device gave
    its assignment up. failed: the rest. `reason` is the coordinator's, or an AbortReason, or one of this file.
    `retryable` says, unless the report was counted, whether coming back within minutes is of use.
    """

    outcome: Literal["reported", "rejected", "aborted", "not-needed", "failed"] = "failed"
    reason: str = ""
    detail: str = ""
    arch: str = ""
    backend: str = ""
    device: str = ""
    task: str = ""
    round: int = 0
    attempt: int = 0
    slot: int = 0
    examples: int = 0
    steps: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    retry: RetryWindow | None = None
    retryable: Literal["transient", "permanent"] | None = None


def run_session(config: DeviceConfig) -> Outcome:
    """Run one session. Whatever goes wrong is in the outcome, and the coordinator was told if it was waiting."""
    started = time.monotonic()
    outcome = Outcome(arch=platform.machine(), backend=config.backend)
    try:
        with only_session(config.state), Transport.to(config.coordinator) as transport:
            outcome = _Session(config, transport, outcome).run()
            outcome = replace(outcome, bytes_up=transport.bytes_up, bytes_down=transport.bytes_down)
    except DeviceError as error:
        outcome = _failed(outcome, error)
    return replace(outcome, seconds=time.monotonic() - started)


def run_forever(
    config: DeviceConfig,
    on_outcome: Callable[[Outcome], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> NoReturn:
    """Run sessions for ever: each comes at a random time in the window that the last one's outcome names."""
    rng = rng or random.Random()
    while True:
        outcome = run_session(config)
        on_outcome(outcome)
        window = outcome.retry or default_window(outcome)
        sleep(rng.uniform(window.min_s, window.max_s))


def default_window(outcome: Outcome) -> RetryWindow:
    """When to come back after an outcome for which the coordinator named no window."""
    if outcome.outcome in {"reported", "not-needed"}:
        return AFTER_WORK
    return HOURS if outcome.retryable == "permanent" else MINUTES


class _Session:
    """One pass through the protocol; `outcome` holds what is known so far."""

    def __init__(self, config: DeviceConfig, transport: Transport, outcome: Outcome) -> None:
        self._config = config
        self._transport = transport
        self._outcome = outcome

    def run(self) -> Outcome:
        """Everything from check-in to receipt."""
        try:
            self._take_part()
        except DeviceError as error:
            self._outcome = _failed(self._outcome, error)
        return self._outcome

    def _take_part(self) -> None:
        config, transport = self._config, self._transport
        self._note(device=device_id(config.state))
        backend, examples = _backend(config.backend), open_examples(config.examples)
        hello = CheckIn(
            device=self._outcome.device,
            runtime=f"muster {version('muster-fl')}, {backend.runtime}",
            formats=(backend.format,),
            examples=examples.counts(),
        )
        answer = transport.check_in(config.population, hello)
        if isinstance(answer, Rejected):
            return self._rejected(answer, backend)
        given = transport.await_assignment(answer.session, config.wait_s)
        if isinstance(given, Rejected):
            return self._rejected(given, backend)
        return self._work(given, backend, examples)

    def _work(self, given: Assignment, backend: Backend, examples: ExampleSource) -> None:
        """Carry out the assignment, or tell the coordinator why not."""
        self._note(task=given.task, round=given.round, attempt=given.attempt, slot=given.slot)
        try:
            result = self._compute(given, backend, examples)
            self._note(examples=result.examples, steps=result.steps)
            self._transport.report(given.assignment, checkpoint.encode({"report": result.report}))
            self._note(outcome="reported")
        except AssignmentError as error:
            self._outcome = replace(_failed(self._outcome, error), outcome="aborted")
            self._abort(given, Abort(error.reason, error.detail))
        except DeviceError as error:
            self._outcome = _failed(self._outcome, error)
            if not (isinstance(error, Refused) and error.status in OVER):
                self._abort(given, Abort("runtime-failed", error.detail))

    def _compute(self, given: Assignment, backend: Backend, examples: ExampleSource) -> Result:
        deadline = time.monotonic() + given.report_within_s
        cache, fetch = BlobCache(self._config.state / "blobs"), self._transport.blob
        try:
            plan = Plan.decode(cache.get(given.plan, fetch))
            refs = plan.graphs.get(backend.format)
            if refs is None:
                raise PlanRefused(
                    f"plan {plan.name!r} has graphs in {sorted(plan.graphs)}, this device runs {backend.format!r}"
                )
            columns = examples.load(plan.examples)
            graphs = {name: backend.load(cache.get(ref, fetch), name) for name, ref in refs.items()}
            broadcast = checkpoint.decode(fetch(given.checkpoint), plan.broadcast)
        except FedcoreError as error:
            raise PlanRefused(str(error)) from error
        place = Place(given.seed, given.round, given.slot)
        return execute(plan, graphs, broadcast, columns, place, keep_going=lambda: time.monotonic() < deadline)

    def _abort(self, given: Assignment, message: Abort) -> None:
        # The outcome keeps the first failure; a coordinator that hears nothing has its own deadline.
        with contextlib.suppress(TransportError):
            self._transport.abort(given.assignment, message)

    def _rejected(self, answer: Rejected, backend: Backend) -> None:
        self._note(outcome="rejected", reason=answer.reason, retry=answer.retry, retryable="transient")
        if answer.reason == "unsupported-format":
            # Only another backend or another task helps. The window stays: when tasks change, the coordinator knows.
            self._note(detail=_unsupported(backend.format, answer.formats), retryable="permanent")

    def _note(self, **known: Any) -> None:
        self._outcome = replace(self._outcome, **known)


def _backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise ConfigError(f"no backend is called {name!r}; there is {sorted(BACKENDS)}")
    return BACKENDS[name]()


def _unsupported(own: str, offered: Sequence[str]) -> str:
    other = [f"run it with --backend {FORMATS[name]}" for name in offered if name in FORMATS]
    remedy = ", or ".join([*other, f"export the plan for {own!r} too"])
    return f"this device runs graphs in format {own!r}, the tasks for it have {', '.join(map(repr, offered))}: {remedy}"


def _failed(outcome: Outcome, error: DeviceError) -> Outcome:
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
