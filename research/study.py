"""A study: a question of a paper, and the trials that answer it on our data sets.

A study is one function. It has its trials run, each with every seed, and puts what they measured into tables and plots.
It may look at the first trials before it asks for more, as a search for a learning rate does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from research.trials import Trials

PerSeed = Sequence[float | None]
"""A number for each seed, shown as mean and deviation; None where training diverged, or the number does not exist."""
Row = list[str | float | PerSeed]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table. The cells of a row are one for each column."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers over two settings, drawn as a heat map. values: by row, then by column."""

    title: str
    row_name: str
    rows: Sequence[float]
    column_name: str
    columns: Sequence[float]
    values: Sequence[Sequence[PerSeed]]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of numbers over x, each with a band from the lowest to the highest seed.

    curves: by name, the points (x, a number for each seed). log_x, log_y: whether an axis is logarithmic.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[float, PerSeed]]]
    log_x: bool = False
    log_y: bool = False


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What a study found. setup: data, model and settings that all trials have in common, in words."""

    setup: str
    tables: Sequence[Table] = ()
    grids: Sequence[Grid] = ()
    plots: Sequence[Plot] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """A study. paper: authors, title, venue and year. find: runs the trials; with `Trials.quick` smaller ones."""

    name: str
    question: str
    paper: str
    find: Callable[[Trials], Findings]


def mean(values: PerSeed) -> float | None:
    """The mean; None where one of the numbers does not exist."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present and len(present) == len(values) else None
