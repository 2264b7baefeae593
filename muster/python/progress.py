"""The progress of work in IPython: one line, which is rewritten. Elsewhere nothing is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from muster.plain import rewrite

EVERY_S = 0.2
"""Seconds from one line to the next, at least: a round may take a millisecond."""


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A block with a function that shows a text in place of the one before; the last one is shown in any case."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        yield lambda text: None
        return
    show = _in_notebook() if hasattr(shell, "kernel") else rewrite
    latest, shown_at = "", -EVERY_S

    def tell(text: str) -> None:
        nonlocal latest, shown_at
        latest = text
        if monotonic() >= shown_at + EVERY_S:
            shown_at = monotonic()
            show(text)

    try:
        yield tell
    finally:
        if latest:
            show(latest, "\n")


def _in_notebook() -> Callable[..., None]:
    """What shows a line as an output of the cell, which the next line replaces."""
    handles: list[Any] = []

    def show(text: str, end: str = "") -> None:
        if handles:
            handles[0].update({"text/plain": text}, raw=True)
        else:
            handles.append(sys.modules["IPython"].display.display({"text/plain": text}, raw=True, display_id=True))

    return show
