"""Logs: text for people, JSON for machines, every library's in the same shape. No line names a device or an assignment.

Code logs through the standard library. Here its records, uvicorn's among them, are given one form.
"""

from __future__ import annotations

import logging
import sys
from textwrap import indent

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from fedcore.visible import visible, visible_lines

_HEARD = ("authority", "coordinator", "fedcore", "muster", "secagg", "uvicorn")
"""Loggers that log from the chosen level on. Others only warn: an HTTP client logs URLs, which hold ids."""


def configure_logs(level: str, form: str) -> bool:
    """Send records of this process from `level` on to standard error; of others from warnings on.

    form: "text", "json", or "auto", which is text on a terminal. Gives whether it is text.
    """
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
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


def _made_visible(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Make text of strangers visible: a record is one line, and a traceback indented lines below it."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = indent(visible_lines(value), "  ") if name == "exception" else visible(value)
    return event
