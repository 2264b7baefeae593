"""The output of commands: one JSON object or a table, progress on standard error, tables for documents, a header."""

from __future__ import annotations

import gc
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedcore.errors import visible
from muster.plain import answer, emit, remark, say, show_fields, show_table

__all__ = [
    "Json",
    "Settings",
    "answer",
    "at_utc",
    "emit",
    "progress",
    "remark",
    "say",
    "say_next",
    "show_fields",
    "show_table",
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value, and nothing else.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the algorithm; may be repeated.")
]

LINE_EVERY_S = 2.0
# The speed, from which the time left follows, is that of so many seconds: a round may take minutes.
SPEED_OVER_S = 900.0
stderr = Console(stderr=True)


def at_utc(at: float) -> str:
    """A time, in seconds since 1970, as people read it."""
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")


def say_next(what: str, command: Sequence[object]) -> None:
    """Print the next step and its command, ready to be typed, on standard error."""
    remark(f"next, {what}:")
    remark(f"  {shlex.join(map(str, command))}")


class _Words(TextColumn):
    """Words of a bar as they are: no markup is in them."""

    def render(self, task: Task) -> Text:
        return Text(visible(self.text_format.format(task=task)))


class _Lines(Progress):
    """Progress without a terminal: a line at the start, one at most every few seconds, one at the end."""

    def __init__(self) -> None:
        super().__init__(console=stderr, disable=True, speed_estimate_period=SPEED_OVER_S)
        self._said: dict[TaskID, tuple[str, float]] = {}

    def add_task(self, description: str, *more: Any, **fields: Any) -> TaskID:
        added = super().add_task(description, *more, **fields)
        self._say(added, 0)
        return added

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        task = self._tasks[task_id]
        done = task.total is not None and task.completed >= task.total
        self._say(task_id, 0 if done else LINE_EVERY_S)

    def stop(self) -> None:
        for task in self.task_ids:
            self._say(task, 0)

    def _say(self, task_id: TaskID, after_s: float) -> None:
        before, at = self._said.get(task_id, ("", -LINE_EVERY_S))
        task = self._tasks[task_id]
        counted = f"{task.completed:.0f} of {task.total:.0f}" if task.total else f"{task.completed:.0f}"
        done = f"{task.description} {counted}" if task.completed or task.total else task.description
        line = f"{done}, {task.fields['note']}" if task.fields["note"] else done
        if line != before and monotonic() >= at + after_s:
            self._said[task_id] = line, monotonic()
            remark(line + _time_left(task))


def _time_left(task: Task) -> str:
    """The time that the rest will take at the present speed, as h:mm:ss; nothing where that cannot be said."""
    seconds = None if task.finished else task.time_remaining
    return "" if seconds is None else f", {timedelta(seconds=round(seconds))} left"


def progress() -> Progress:
    """A progress bar on standard error; plain lines when that is not a terminal."""
    if not stderr.is_terminal:
        return _Lines()
    columns = (
        _Words("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        _Words("{task.fields[note]}"),
    )
    return Progress(*columns, console=stderr, speed_estimate_period=SPEED_OVER_S)


class Say(Protocol):
    """Shows a note about the present work, and adds `done` to the count of finished things."""

    def __call__(self, note: str, done: int = 0) -> None: ...


@contextmanager
def doing(what: str) -> Iterator[Say]:
    """A progress bar for work of unknown length."""
    with progress() as bar:
        task = bar.add_task(what, total=None, note="")
        yield lambda note, done=0: bar.update(task, note=note, advance=done)


@contextmanager
def loading() -> Iterator[None]:
    """A block that imports large libraries, with a progress bar.

    It collects no garbage: the libraries' objects stay, and looking at them time and again took a fifth of the time.
    """
    with doing("load libraries"):
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()


# Tables as text for documents: Markdown and LaTeX.


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "−": "$-$"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def markdown(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of cells in Markdown; a cell may hold a bar."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in body)]
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- |", "|---|").replace(" --- |", "---|")
    )


def plain_markdown(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of plain text in Markdown, where no character of a cell is markup."""
    return markdown([_escaped(name) for name in columns], [[_escaped(cell) for cell in row] for row in body])


def latex(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of plain text in LaTeX: a `tabular`, which needs no package."""
    head, *rows = [" & ".join(map(_in_latex, row)) + r" \\" for row in (columns, *body)]
    lines = [rf"\begin{{tabular}}{{{'l' * len(columns)}}}", r"\hline", head, r"\hline", *rows, r"\hline"]
    return "\n".join([*lines, "\\end{tabular}\n"])


def _escaped(cell: str) -> str:
    return re.sub(r"([\\`*_<>\[\]])", r"\\\1", _one_line(cell))


def _in_latex(cell: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in _one_line(cell))


def _one_line(cell: str) -> str:
    return " ".join(cell.split())


# The header of every result: benchmark, date, machine and versions.


PACKAGES = ("muster-fl", "numpy", "cryptography", "onnxruntime", "torch", "executorch")
"""Packages whose versions decide figures."""


def header(benchmark: str) -> dict[str, object]:
    """The first keys of a result: `benchmark`, `date` in UTC, `machine`, `cores` and `versions`.

    cores: those that this process may use. versions: of Python and of PACKAGES, as far as they are installed.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {_processor()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {"python": sys.version.split()[0], **dict(_versions())},
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
