"""Errors of the exporter, and silence of other libraries' loggers.

ExportError
├── UnknownModel            no built-in model or importable function has that name
├── UnknownFormat           graphs cannot be written in that format, or not by this installation
├── InvalidModel            a ModelSpec that cannot be trained as it stands (integer parameters, …)
│   ├── UnsupportedModule   a layer that federated training cannot use, with what to use instead
│   └── ImpureModel         a model whose loss depends on more than parameters and example
├── UnsupportedOperator     an operator for which there is no on-device form
├── DynamicControlFlow      the model's Python branches on data or fixes the batch size
└── ParityFailed            the exported graphs do not compute what torch computes
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

MOST_CHARACTERS = 200
"""The most characters shown of a foreign message."""


class ExportError(Exception):
    """Base of every error raised by `export`."""


class UnknownModel(ExportError):
    """No built-in model or importable function has that name."""


class UnknownFormat(ExportError):
    """Graphs cannot be written in that format, or not by this installation."""


class InvalidModel(ExportError):
    """A ModelSpec that cannot be trained as it stands."""


class UnsupportedModule(InvalidModel):
    """A layer that federated training cannot use, with what to use instead."""


class ImpureModel(InvalidModel):
    """A model whose loss of an example depends on more than parameters, that example and its noise."""


class UnsupportedOperator(ExportError):
    """An operator for which there is no on-device form."""


class DynamicControlFlow(ExportError):
    """The model's Python branches on data or fixes the batch size."""


class ParityFailed(ExportError):
    """The exported graphs do not compute what torch computes."""


def reason(error: BaseException) -> str:
    """An error of foreign code in one line: its kind, and the start of the first line of its message."""
    words = str(error).strip().partition("\n")[0]
    if len(words) > MOST_CHARACTERS:
        words = f"{words[:MOST_CHARACTERS]}…"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


# Silencing of other libraries' loggers.


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silence the logger `name` during the block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
