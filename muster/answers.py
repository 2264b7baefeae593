"""Output of answers: a table, CSV, JSON, and a picture."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fedcore.errors import NotWritten
from muster.output import emit, remark, say, show_table

if TYPE_CHECKING:
    from fedcore.questions.answer import Answer

STANDARD_OUTPUT = Path("-")


class Outlet(NamedTuple):
    """Where an answer goes. began: when the command did, on the monotonic clock."""

    table: Path | None
    plot: Path | None
    json: bool
    began: float

    def check(self) -> None:
        """Raise NotWritten for a picture in no format, and a file in no folder: an answer may take an hour."""
        from muster.pictures.picture import FORMATS

        if self.plot is not None and self.plot.suffix not in FORMATS:
            raise NotWritten(errno.EINVAL, f"a picture ends in {' or '.join(FORMATS)}", str(self.plot))
        for file in (self.plot, self.table):
            if file is not None and not file.absolute().parent.is_dir():
                raise NotWritten(errno.ENOENT, "there is no such folder", str(file))

    def show(self, answer: Answer, task: str | None = None, so_far: str = "") -> None:
        """Show an answer. task: whose answer it is. so_far: a sentence where more is to come."""
        seconds = time.monotonic() - self.began
        if self.plot is not None:
            from muster.pictures.bars import draw_answer

            draw_answer(answer).save(self.plot)
        if self.table is not None:
            from fedcore.questions.reading import as_csv

            text = as_csv(answer.columns, answer.rows, answer.errors)
            if self.table == STANDARD_OUTPUT:
                for line in text.splitlines():
                    say(line)
            else:
                self.table.write_text(text, "utf-8")
        if self.json:
            facts = {
                "columns": answer.columns,
                "rows": answer.rows,
                "errors": answer.errors,
                "devices": answer.devices,
                "hidden_groups": answer.hidden,
                "seconds": round(seconds, 3),
                "task": task,
            }
            emit(msgspec.to_builtins(facts))
        elif self.table != STANDARD_OUTPUT:
            show_table(answer.columns, with_errors(answer))
        remark(f"{_counted(answer.devices, 'device')} answered{_hidden(answer)}{so_far}")


def with_errors(answer: Answer) -> list[tuple[Any, ...]]:
    """The rows, with ± behind numbers that have noise."""
    if answer.errors is None:
        return [tuple(row) for row in answer.rows]
    return [
        tuple(
            value if error is None or value is None else f"{value:.6g} ± {error:.2g}"
            for value, error in zip(row, errors, strict=True)
        )
        for row, errors in zip(answer.rows, answer.errors, strict=True)
    ]


def _hidden(answer: Answer) -> str:
    if not answer.hidden:
        return "" if answer.rows else "; no value or group has enough of them to be shown (--minimum-devices)"
    verb = "is" if answer.hidden == 1 else "are"
    return f"; {_counted(answer.hidden, 'group')} of too few devices {verb} not shown"


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"
