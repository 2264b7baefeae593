"""Logs: text for people, JSON for machines, every library's in the same shape. No line names a device or an assignment.

Code logs through the standard library. Here its records, uvicorn's among them, are given one form.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from contextvars import ContextVar
from textwrap import indent
from typing import NamedTuple

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from fedcore.errors import visible, visible_lines

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
