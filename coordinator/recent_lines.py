"""Recent lines of the log, bounded and in memory, for the pages of tasks."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

_MOST_LINES, _LONGEST = 2000, 500
_HEARD = "coordinator"


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
        logging.getLogger(_HEARD).addHandler(self)

    def end(self) -> None:
        """Stop listening."""
        logging.getLogger(_HEARD).removeHandler(self)
