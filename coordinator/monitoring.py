"""Logs and metrics of the service. None of them names a device, an assignment, a task or a population.

Code logs through the standard library. Here its records, uvicorn's among them, are given one form.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter as Tally, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache
from textwrap import indent
from typing import NamedTuple

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from structlog.typing import EventDict, Processor, WrappedLogger

from coordinator.rules.progress import Progress, Reason
from coordinator.rules.rounds import Round
from coordinator.rules.states import AssignmentState, RoundState
from fedcore.errors import visible, visible_lines
from fedcore.wire.messages import Accepted, CheckInAnswer

_HEARD = ("authority", "coordinator", "fedcore", "muster", "secagg", "uvicorn")
"""Loggers that log from the chosen level on. Others only warn: an HTTP client logs URLs, which hold ids."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that this task answers; lines of the log carry it."""


def configure_logs(level: str, form: str) -> bool:
    """Send records of this process from `level` on to standard error; of others from warnings on.

    form: "text", "json", or "auto", which is text on a terminal. Gives whether it is text.
    """
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        _with_request_id,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(("route", "status", "milliseconds")),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks stay plain: renderers that show local variables would show assignment ids.
    ending: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if text:
        console = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        ending = [structlog.processors.format_exc_info, _made_visible, console]
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _HEARD:
        logging.getLogger(name).setLevel(level.upper())
    return text


def _with_request_id(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Name the request that a line is about, if it is about one."""
    if request_id := REQUEST_ID.get():
        event["request_id"] = request_id
    return event


def _made_visible(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Make text of strangers visible: a record is one line, and a traceback indented lines below it."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = indent(visible_lines(value), "  ") if name == "exception" else visible(value)
    return event


_MOST_LINES, _LONGEST = 2000, 500
_OURS = "coordinator"


class Line(NamedTuple):
    """A line of the log: when, in seconds since 1970, its level and its words, without a traceback."""

    at: float
    level: str
    words: str


class RecentLines(logging.Handler):
    """The last lines that this process logged about its own work, from the level on that is logged at all."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[Line] = deque(maxlen=_MOST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append(Line(record.created, record.levelname.lower(), record.getMessage()[:_LONGEST]))

    def about(self, task: str) -> list[Line]:
        """The lines that name a task, the newest first."""
        return [line for line in reversed(self._lines.copy()) if task in line.words]

    def begin(self) -> None:
        """Listen to the log."""
        logging.getLogger(_OURS).addHandler(self)

    def end(self) -> None:
        """Stop listening."""
        logging.getLogger(_OURS).removeHandler(self)


# Metrics of the service for Prometheus. No label ever names a device, a task or a population.
#
# The site lists them in docs/operations.md.


_VERSIONS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LONG_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60)


class Metrics:
    """One process's counts, in a registry of their own. Safe to count from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.check_ins = self._counter("check_ins", "check-ins, by outcome and reason", "outcome", "reason")
        self._check_ins_of = cache(self.check_ins.labels)  # finding one by its labels costs more than counting
        self.waiting = self._gauge("sessions_waiting", "sessions that wait for an assignment")
        self.rounds = self._counter("rounds", "rounds that ended, by state and reason", "state", "reason")
        self.rounds.labels(RoundState.COMMITTED, "")  # from 0 on, so that Prometheus sees the first one come
        self.reports = self._counter("reports", "reports that were counted; masked ones when their sum came out")
        self.aborts = self._counter("aborts", "assignments that devices aborted, by reason", "reason")
        self.unreported = self._counter(
            "unreported", "assignments that ended without a report, without the aborted ones", "state"
        )
        self.staleness = self._histogram(
            "report_staleness", "versions between the model of a report and its round, in mode buffered", _VERSIONS
        )
        self.round_duration = self._histogram(
            "round_duration_seconds", "from opening to end, by state", _LONG_S, "state"
        )
        self.round_steps = self._histogram("round_step_seconds", "steps of rounds that came through", _STEP_S, "step")
        self.requests = self._histogram(
            "request_duration_seconds", "until the answer was sent, by route and status; waiting included", _REQUEST_S,
            "route", "status",
        )  # fmt: skip
        self.received = self._counter("received_bytes", "bytes of request bodies, by route", "route")
        self.sent = self._counter("sent_bytes", "bytes of answers, by route; blobs are one of them", "route")
        self._of: dict[tuple[str, int], tuple[Histogram, Counter, Counter]] = {}
        self.problems = self._counter("problems", "problem documents, by route and type", "route", "problem")
        self.shed = self._counter(
            "shed_requests", "requests refused under load, by the limit that was reached", "limit"
        )
        self.closed = self._counter(
            "closed_connections", "connections closed under load, by the limit that was reached", "limit"
        )
        self.stalled = self._gauge(
            "tasks_stalled", "tasks that make no progress, by reason; every replica counts all tasks", "reason"
        )
        self.alert_deliveries = self._counter(
            "alert_deliveries", "tries to tell the webhook of an alert, by outcome: delivered or failed", "outcome"
        )
        self.populations = self._gauge("populations_held", "populations that this replica drives")
        self.queue = self._gauge("queue_depth", "requests that wait for the driver")
        self.connections = self._gauge("requests_in_progress", "device requests in progress, waiting ones too")
        self.transactions = self._histogram("transaction_seconds", "transactions of the driver", _SHORT_S)
        self.turns = self._histogram("turn_seconds", "turns of the driver, transactions included", _SHORT_S)

    def requested(self, route: str, status: int, seconds: float, received: int, sent: int) -> None:
        """A request was answered; received and sent are bytes of bodies."""
        counters = self._of.get((route, status))
        if counters is None:
            # Finding them by their labels costs more than counting.
            counters = self.requests.labels(route, status), self.received.labels(route), self.sent.labels(route)
            self._of[route, status] = counters
        counters[0].observe(seconds)
        counters[1].inc(received)
        counters[2].inc(sent)

    def checked_in(self, answer: CheckInAnswer) -> None:
        """A check-in was answered."""
        if isinstance(answer, Accepted):
            self._check_ins_of("accepted", "").inc()
        else:
            self._check_ins_of("rejected", answer.reason).inc()

    def round_moved(self, before: Round, after: Round, step_s: float, round_s: float) -> None:
        """A round went on, durably. step_s, round_s: seconds since its last step began, and since it was opened."""
        step = _step_between(before, after)
        if step is not None:
            self.round_steps.labels(step).observe(step_s)
        if after.reported > before.reported:
            self.reports.inc(after.reported - before.reported)
        for staleness, count in enumerate(after.staleness):
            for _ in range(count - (before.staleness[staleness] if staleness < len(before.staleness) else 0)):
                self.staleness.observe(staleness)
        self.unreported.labels(AssignmentState.LOST).inc(after.lost - before.lost)
        self.unreported.labels(AssignmentState.EXPIRED).inc(max(0, after.expired - before.expired))
        self.unreported.labels(AssignmentState.TOO_STALE).inc(after.stale - before.stale)
        if after.closed and not before.closed:
            self.unreported.labels(AssignmentState.NOT_NEEDED).inc(after.outstanding)
        if after.state.ended and not before.state.ended:
            self.rounds.labels(after.state, after.reason).inc()
            self.round_duration.labels(after.state).observe(round_s)

    def watch(self, queue_depth: Callable[[], int], connections: Callable[[], int]) -> None:
        """Read these two at every scrape."""
        self.queue.set_function(queue_depth)
        self.connections.set_function(connections)

    def tasks_are(self, tasks: Iterable[Progress]) -> None:
        """Every task, as it is now."""
        reasons = Tally(progress.reason for progress in tasks)
        for reason in Reason:
            if reason.stalled:
                self.stalled.labels(reason).set(reasons[reason])

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"muster_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"muster_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"muster_{name}", about, labels, registry=self.registry, buckets=buckets)


def _step_between(before: Round, after: Round) -> str | None:
    """The step of a round that has come to its end, if one has."""
    if before.state is RoundState.SELECTING and after.state is RoundState.CONFIGURING:
        return "selection"
    if before.state is not RoundState.REPORTING or after.state is RoundState.ABANDONED:
        return None
    if after.state is RoundState.AGGREGATING:
        return "unmasking" if before.revealed else "reporting"
    return "reporting" if after.revealed and not before.revealed else None
