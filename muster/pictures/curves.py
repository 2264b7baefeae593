"""Learning curves as an SVG picture."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pygal
from pygal.etree import etree
from pygal.style import Style

from fedcore.private_files import write_whole

COLOURS = ("#1f77b4", "#d95f02", "#2ca02c")
RANGE_COLOURS = ("#808080", "#3b8eea", "#e07b39", "#2ea35f", "#b565d9", "#d64f6c", "#a08a1a")
"""Of middling brightness: legible on white and on black."""
DARK = "@media (prefers-color-scheme: dark) { text { fill: #bbb !important } .axis .line { stroke: #888 } }"

etree.to_etree()  # the same bytes where lxml is installed, which pygal would prefer, as where it is not


def draw_curves(courses: Mapping[str, Sequence[Mapping[str, float]]], path: Path, title: str) -> None:
    """Write what held-out users measured over rounds as a curve for each course: accuracy, or loss without one.

    courses: points by name, with their `round` and, where users measured, `test.accuracy` or `test.loss`.
    """
    points = [point for course in courses.values() for point in course]
    figure = "test.accuracy" if any("test.accuracy" in point for point in points) else "test.loss"
    chart = pygal.XY(
        title=title,
        x_title="round",
        y_title=f"{figure.removeprefix('test.')}, unseen users",
        style=Style(background="white", plot_background="white", colors=COLOURS, guide_stroke_color="#ccc"),
        legend_at_bottom=True,
        dots_size=2,
        js=[],  # pygal's own script would come from the network
        height=450,
        **({"range": (0, 1)} if figure == "test.accuracy" else {}),
    )
    for name, course in courses.items():
        chart.add(name, [(point["round"], point[figure]) for point in course if figure in point])
    write_whole(path, chart.render())


def draw_ranges(curves: Mapping[str, Sequence[Sequence[float]]], every: int, title: str) -> str:
    """The SVG text of each algorithm's mean accuracy over its trainings, in a band from the lowest to the highest.

    curves: by name, the accuracies after rounds `every`, 2 · `every`, … of each training, 0 to 1.
    """
    found = [accuracy for trainings in curves.values() for accuracies in trainings for accuracy in accuracies]
    last = every * max(len(accuracies) for trainings in curves.values() for accuracies in trainings)
    axes = Axes(
        title=title,
        x_title="round",
        y_title="accuracy, unseen users",
        x_labels=list(range(2 * every, last + 1, 2 * every)),
        range=(math.floor(10 * min(found)) / 10, math.ceil(10 * max(found)) / 10),
    )
    bands = {
        name: [
            (every * number, min(at), statistics.fmean(at), max(at))
            for number, at in enumerate(zip(*trainings, strict=True), 1)
        ]
        for name, trainings in curves.items()
    }
    return draw_bands(bands, axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Titles, labels and range of a picture. A label is a number, or a text with the number where it stands."""

    title: str
    x_title: str
    y_title: str
    x_labels: Sequence[float | Mapping[str, object]] | None = None
    y_labels: Sequence[float | Mapping[str, object]] | None = None
    range: tuple[float, float] | None = None


def draw_bands(bands: Mapping[str, Sequence[tuple[float, float, float, float]]], axes: Axes) -> str:
    """The SVG text of curves in bands: by name, the points (x, lowest y, mean y, highest y) of each."""
    colours = RANGE_COLOURS[: len(bands)]
    chart = pygal.XY(
        title=axes.title,
        x_title=axes.x_title,
        y_title=axes.y_title,
        range=axes.range,
        style=Style(
            background="transparent",
            plot_background="transparent",
            foreground="#666",
            foreground_strong="#444",
            foreground_subtle="#999",
            colors=colours * 2,
            guide_stroke_color="#8884",
            major_guide_stroke_color="#8888",
            font_family="system-ui, sans-serif",
            title_font_size=15,
            legend_font_size=14,
            stroke_width=2,
        ),
        css=["file://style.css", "file://graph.css", "inline:" + DARK + _bands(colours)],
        show_dots=False,
        legend_at_bottom=True,
        legend_at_bottom_columns=4,
        truncate_legend=-1,
        js=[],
        no_prefix=True,
        width=720,
        height=420,
    )
    if axes.x_labels:
        chart.x_labels = axes.x_labels
    if axes.y_labels:
        chart.y_labels = axes.y_labels
    for points in bands.values():
        low, high = [(x, bottom) for x, bottom, _, _ in points], [(x, top) for x, _, _, top in points]
        chart.add(None, high + low[::-1])
    for name, points in bands.items():
        chart.add(name, [(x, middle) for x, _, middle, _ in points])
    # Its comments hold the date: without them equal curves give equal bytes.
    return re.sub(r"<!--.*?-->", "", str(chart.render(is_unicode=True)), flags=re.DOTALL)


def _bands(colours: Sequence[str]) -> str:
    """The style of the first series, which are bands: filled, without a line."""
    return "".join(
        f".serie-{number} .nofill {{ fill: {colour}; fill-opacity: 0.13; stroke: none }}"
        for number, colour in enumerate(colours)
    )
