"""Traces: stretches of time in which devices of a real population could come, from a CSV file."""

from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcore.errors import why
from simulator.errors import ForecastError
from simulator.forecast.stretches import DAY_S, Rows, Times

if TYPE_CHECKING:
    from _csv import Reader

COLUMNS = ["device", "start_s", "end_s"]


@dataclass(frozen=True, slots=True)
class Traced:
    """The stretches of M traced devices, which begin anew after `period_s`; each of N devices goes by one of them.

    starts, ends: of all stretches, device by device, in order. lines: the starts, each device's a period after those of
    the one before. first: where those of each traced device begin, and their number (M + 1,). of: the traced device of
    each device (N,).
    """

    starts: Times
    ends: Times
    lines: Times
    first: Rows
    of: Rows
    period_s: float

    def can_until(self, rows: Rows, now: float) -> Times:
        """The end of the stretch in which each of `rows` can come now; 0 where it cannot."""
        into = now % self.period_s
        last = self._last(rows, into)
        begun = last >= self.first[self.of[rows]]
        inside = begun & (into < self.ends[last])
        return np.where(inside, now - into + self.ends[last], 0.0)

    def next_stretch(self, rows: Rows, now: float) -> Times:
        """The start of the next stretch of each of `rows`, after now."""
        into, traced = now % self.period_s, self.of[rows]
        following = self._last(rows, into) + 1
        again = following >= self.first[traced + 1]
        following = np.where(again, self.first[traced], following)
        starts: Times = now - into + self.starts[following] + self.period_s * again
        return starts

    def longest_s(self) -> Times:
        """The longest stretch of each device (N,), in seconds."""
        longest: Times = np.maximum.reduceat(self.ends - self.starts, self.first[:-1])[self.of]
        return longest

    def _last(self, rows: Rows, into: float) -> Rows:
        """The stretch of each device that began last; that of another device where none has begun."""
        found: NDArray[np.int64] = np.searchsorted(self.lines, self.of[rows] * self.period_s + into, side="right") - 1
        return found


def read_trace(path: Path, devices: int, seed: int) -> Traced:
    """The stretches of a file with a line of `device,start_s,end_s` for each, for so many devices.

    Raises ForecastError with the number of the first line that cannot be.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = _stretches(path, csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ForecastError(f"trace {path}: {why(error)}") from error
    counts = [len(stretches) for stretches in found]
    starts, ends = np.array([(start, end) for stretches in found for start, end, _ in stretches], np.float64).T
    period_s = DAY_S * math.ceil(ends.max() / DAY_S)
    lines = np.repeat(np.arange(len(counts)), counts) * period_s + starts
    of = np.random.default_rng((seed, 3)).permutation(devices) % len(counts)
    return Traced(starts, ends, lines, np.concatenate(([0], np.cumsum(counts))), of, period_s)


def _stretches(path: Path, lines: Reader) -> list[list[tuple[float, float, int]]]:
    """The stretches of each device in order, with their lines in the file."""
    if next(lines, None) != COLUMNS:
        raise ForecastError(f"trace {path}, line 1: the columns are {','.join(COLUMNS)}")
    found: defaultdict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for cells in lines:
        try:
            device, (start, end) = cells[0], map(float, cells[1:])
        except (ValueError, IndexError):
            words = f"{','.join(cells)!r} is not a device and two times in seconds"
            raise _impossible(path, lines.line_num, words) from None
        if not 0 <= start < end < math.inf:
            words = f"a stretch from {start:g} to {end:g}: it must begin at 0 or later, and end after that"
            raise _impossible(path, lines.line_num, words)
        found[device].append((start, end, lines.line_num))
    if not found:
        raise ForecastError(f"trace {path} has no stretch: add lines of {','.join(COLUMNS)}")
    for stretches in found.values():
        stretches.sort()
        for (_, end, line), (start, _, other) in itertools.pairwise(stretches):
            if start < end:
                words = f"it overlaps the stretch of line {min(line, other)} of the same device"
                raise _impossible(path, max(line, other), words)
    return list(found.values())


def _impossible(path: Path, line: int, words: str) -> ForecastError:
    return ForecastError(f"trace {path}, line {line}: {words}")
