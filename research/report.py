"""Reports of studies: a page with tables and pictures, and the same as JSON.

A page's text before its results is written by hand: what the paper found, and what we found.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedcore.private_files import write_whole
from fedcore.validation import decoder
from muster.output import markdown
from muster.pictures import Axes, Picture, draw_bands, draw_heat_map, ends_and_mean, write_svg_and_png
from research.study import Findings, Grid, PerSeed, Plot, mean

RESULTS = "## Results\n"
DIGITS = 4
"""Significant digits that a report keeps."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A finished study. command: repeats it. date: in UTC. cpu_minutes: over all trials."""

    study: str
    question: str
    paper: str
    command: str
    date: str
    machine: str
    seeds: list[int]
    quick: bool
    cpu_minutes: float
    findings: Findings


REPORT = decoder(Report)


def write(report: Report, folder: Path) -> Path:
    """Write a report's JSON, pictures and page, whose path it returns. Handwritten text of an earlier page stays."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode(_rounded(msgspec.to_builtins(report)))
    report = REPORT.decode(encoded)
    page = folder / f"{report.study}.md"
    title = report.study.replace("-", " ").capitalize()
    by_hand, _, before = page.read_text().partition(RESULTS) if page.exists() else (f"# {title}\n\n", "", "")
    write_whole(folder / f"{report.study}.json", encoded + b"\n")
    write_whole(page, (by_hand + results(report, tables=_mark(report) not in before)).encode())
    write_svg_and_png({folder / name: picture for name, picture in pictures(report).items()})
    return page


def pictures(report: Report) -> dict[str, Picture]:
    """Pictures by file name, grids first."""
    drawn = [_heat_map(grid) for grid in report.findings.grids] + [_curves(plot) for plot in report.findings.plots]
    return {f"{report.study}-{number}.svg": picture for number, picture in enumerate(drawn, 1)}


def results(report: Report, *, tables: bool = True) -> str:
    """The results section of a page; without its tables it has a mark, where the site of the documents puts them."""
    return RESULTS + "\n" + "\n".join(_sections(report, numbers(report) if tables else _mark(report)))


def numbers(report: Report) -> str:
    """The tables of a page, and what was measured."""
    return "\n".join(_numbers(report))


def _mark(report: Report) -> str:
    return f"<!-- made: results of {report.study} -->\n"


def summary(report: Report) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """The tables of a report, grids first: title, columns and rows, as text."""
    for grid in report.findings.grids:
        rows = [[_label(row), *map(cell, values)] for row, values in zip(grid.rows, grid.values, strict=True)]
        yield grid.title, [f"{grid.row_name} \\ {grid.column_name}", *map(_label, grid.columns)], rows
    for section in report.findings.tables:
        yield section.title, section.columns, [[cell(value) for value in row] for row in section.rows]


def cell(value: str | float | PerSeed) -> str:
    """A cell as text: values per seed as mean and standard deviation, with the number of seeds without one."""
    if isinstance(value, str):
        return value
    if isinstance(value, float | int):
        return f"{value:.3g}"
    numbers = [number for number in value if number is not None]
    missing = f" (none for {len(value) - len(numbers)} of {len(value)})" if len(numbers) < len(value) else ""
    if not numbers:
        return "none"
    middle = statistics.fmean(numbers)
    magnitude = math.floor(math.log10(abs(middle))) if middle else 0
    if magnitude < -4:
        scaled = [None if number is None else number * 10.0**-magnitude for number in value]
        return f"({cell(scaled)}) · 10^−{-magnitude}"
    decimals = max(0, 2 - magnitude)
    spread = f" ± {statistics.stdev(numbers):.{decimals}f}" if len(numbers) > 1 else ""
    return f"{middle:.{decimals}f}{spread}".replace("-", "−") + missing


def _sections(report: Report, tables: str) -> Iterator[str]:
    yield _wrapped(f"Question: {report.question} Paper: {report.paper}.")
    if report.quick:
        yield _wrapped("These are the smallest sizes, from `--quick`: they show only that the study runs.")
    titles = [grid.title for grid in report.findings.grids] + [plot.title for plot in report.findings.plots]
    for name, title in zip(pictures(report), titles, strict=True):
        yield f"![{title}]({name})\n"
    yield tables
    yield _wrapped(
        f"Made by `{report.command}` on {report.date}, in {report.cpu_minutes:.1f} minutes of CPU time on "
        f"{report.machine}. The numbers of every seed are in [{report.study}.json]({report.study}.json)."
    )


def _numbers(report: Report) -> Iterator[str]:
    seeds = ", ".join(map(str, report.seeds))
    several = f"Means and standard deviations over {len(report.seeds)} seeds ({seeds})."
    yield _wrapped(f"{report.findings.setup} {several if len(report.seeds) > 1 else f'Seed {seeds}.'}")
    for title, columns, rows in summary(report):
        yield f"### {title}\n\n{markdown(columns, rows)}"


def _wrapped(words: str) -> str:
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _label(number: float) -> str:
    return f"{number:g}"


def _heat_map(grid: Grid) -> Picture:
    """A grid as a heat map of means over seeds."""
    means = [[mean(values) for values in row] for row in grid.values]
    rows, columns = [_label(setting) for setting in grid.rows], [_label(setting) for setting in grid.columns]
    return draw_heat_map(grid.title, (grid.row_name, rows), (grid.column_name, columns), means)


def _curves(plot: Plot) -> Picture:
    bands = {
        name: [
            (x, *ends_and_mean(numbers))
            for x, values in points
            if (numbers := [number for number in values if number is not None])
        ]
        for name, points in plot.curves.items()
    }
    return draw_bands(bands, Axes(x=plot.x, y=plot.y, title=plot.title, log_x=plot.log_x, log_y=plot.log_y))


def _rounded(value: Any) -> Any:
    """Plain values, with floats rounded to DIGITS significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
