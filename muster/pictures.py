"""Pictures of runs, studies and answers: curves, heat maps and bars, as SVG, PNG, or lines of characters."""

from __future__ import annotations

import errno
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np
import pygal
from numpy.typing import NDArray
from pygal.etree import etree
from pygal.style import Style

from fedcore.errors import NotWritten, visible
from fedcore.private_files import write_whole
from fedcore.questions.answer import Answer
from muster.output import remark

if TYPE_CHECKING:
    from simulator.forecast.twin import Forecast


# Curves and bands around them as pictures: SVG, PNG, or lines of characters.


FORMATS = (".svg", ".png")
FONTS = "system-ui, Arial, DejaVu Sans, Noto Sans, sans-serif"
"""Browsers take the first; a PNG file is drawn with the first that is installed."""
GREY = "#888"
"""The colour of text: legible on white and on black."""
_ZOOM = 1.5
"""Pixels of a PNG file for each unit of the SVG."""
_WORD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20"><text y="15" font-family="{FONTS}">%s</text></svg>'
)


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A picture. svg: its text; equal figures give equal text."""

    svg: str

    def __repr__(self) -> str:
        return f"Picture({len(self.svg):,} characters of SVG)"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: Path | str) -> None:
        """Write it in the format of the path's ending, one of FORMATS.

        Raises NotWritten, also for another ending, and for a PNG file without an installed font; for one without resvg
        ModuleNotFoundError.
        """
        path = Path(path)
        if path.suffix not in FORMATS:
            raise NotWritten(errno.EINVAL, f"a picture ends in {' or '.join(FORMATS)}", str(path))
        write_whole(path, self.svg.encode() if path.suffix == ".svg" else self._png(path))

    def _png(self, path: Path) -> bytes:
        from resvg_py import svg_to_bytes

        if not draws_words():
            raise NotWritten(errno.ENOENT, "no font is installed; install DejaVu Sans, or write an SVG", str(path))
        return bytes(svg_to_bytes(svg_string=self.svg, zoom=_ZOOM, background="white"))


def draws_words() -> bool:
    """Whether a font is installed that a PNG file can be drawn with. Raises ModuleNotFoundError without resvg."""
    from resvg_py import svg_to_bytes

    return bytes(svg_to_bytes(svg_string=_WORD % "word")) != bytes(svg_to_bytes(svg_string=_WORD % ""))


def write_svg_and_png(pictures: Mapping[Path, Picture]) -> None:
    """Write each picture to its path, an SVG file; with resvg and a font, as a PNG file beside it too."""
    for path, picture in pictures.items():
        picture.save(path)
    if find_spec("resvg_py") is None:
        return remark("PNG files need resvg-py: pip install 'muster-fl[plot]'")
    if not draws_words():
        return remark("PNG files need a font: install DejaVu Sans")
    for path, picture in pictures.items():
        picture.save(path.with_suffix(".png"))
    return None


Points = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float, float]]
"""Points (x, lowest y, mean y, highest y)."""
COLOURS = ("#808080", "#3b8eea", "#e07b39", "#2ea35f", "#b565d9", "#d64f6c", "#a08a1a", "#1fa3a3", "#8c6a4f", "#6a73c9")
"""Legible on white and on black. The first, grey, is for a reference curve among bands."""
_FEW = 4
"""Over a shorter range of whole numbers, such as rounds, each has its label."""
DARK = "@media (prefers-color-scheme: dark) { text { fill: #bbb !important } .axis .line { stroke: #888 } }"

etree.to_etree()  # pygal prefers lxml where it is installed, and would write other bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Names of x and y, the title, and the range of y. log_x, log_y: whether they are logarithmic."""

    x: str
    y: str
    title: str | None = None
    range: tuple[float, float] | None = None
    log_x: bool = False
    log_y: bool = False


def draw_measured(courses: Mapping[str, Sequence[Mapping[str, float]]], title: str) -> Picture:
    """Draw the accuracy of held-out users over rounds, a curve for each course; the loss where there is none.

    courses: points by name, with their `round` and, where users measured, `test.accuracy` or `test.loss`.
    """
    points = [point for course in courses.values() for point in course]
    figure = "test.accuracy" if any("test.accuracy" in point for point in points) else "test.loss"
    curves = {
        name: [(point["round"], point[figure]) for point in course if figure in point]
        for name, course in courses.items()
    }
    limits = (0.0, 1.0) if figure == "test.accuracy" else None
    name = f"{figure.removeprefix('test.')}, unseen users"
    return draw_curves(curves, Axes(x="round", y=name, title=title, range=limits))


def draw_ranges(curves: Mapping[str, Sequence[Sequence[float]]], every: int, title: str) -> Picture:
    """Draw each algorithm's mean accuracy over its trainings, in a band from the lowest to the highest.

    curves: by name, the accuracies after rounds `every`, 2 · `every`, … of each training, 0 to 1.
    """
    values = [accuracy for trainings in curves.values() for accuracies in trainings for accuracy in accuracies]
    limits = math.floor(10 * min(values)) / 10, math.ceil(10 * max(values)) / 10
    bands = {
        name: [
            (every * number, *ends_and_mean(accuracies))
            for number, accuracies in enumerate(zip(*trainings, strict=True), 1)
        ]
        for name, trainings in curves.items()
    }
    return draw_bands(bands, Axes(x="round", y="accuracy, unseen users", title=title, range=limits))


def ends_and_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The lowest value, the mean and the highest value."""
    return min(values), statistics.fmean(values), max(values)


def draw_curves(curves: Mapping[str, Points], axes: Axes) -> Picture:
    """Draw curves, by name."""
    return _draw({}, curves, axes, COLOURS[1:])


def draw_repeated(repeated: Mapping[str, Sequence[Points]], axes: Axes) -> Picture:
    """Draw the mean over the repetitions of each curve, by name, in a band from the lowest to the highest.

    A mean goes as far as all of its repetitions do.
    """
    bands = {
        name: [
            (statistics.fmean(x for x, _ in points), *ends_and_mean([y for _, y in points]))
            for points in zip(*curves, strict=False)
        ]
        for name, curves in repeated.items()
    }
    if all(len(curves) == 1 for curves in repeated.values()):
        return draw_curves({name: curves[0] for name, curves in repeated.items()}, axes)
    return draw_bands(bands, axes, COLOURS[1:])


def draw_bands(bands: Mapping[str, Band], axes: Axes, palette: Sequence[str] = COLOURS) -> Picture:
    """Draw curves in bands, by name."""
    areas = {
        name: [*((x, high) for x, _, _, high in points), *((x, low) for x, low, _, _ in reversed(points))]
        for name, points in bands.items()
    }
    curves = {name: [(x, mean) for x, _, mean, _ in points] for name, points in bands.items()}
    return _draw(areas, curves, axes, palette)


def _draw(areas: Mapping[str, Points], curves: Mapping[str, Points], axes: Axes, palette: Sequence[str]) -> Picture:
    place_x, place_y = (math.log10 if log else float for log in (axes.log_x, axes.log_y))
    colours = [palette[number % len(palette)] for number in range(len(curves))]
    chart = pygal.XY(
        title=axes.title,
        x_title=axes.x,
        y_title=axes.y,
        range=axes.range,
        style=Style(
            background="transparent",
            plot_background="transparent",
            foreground="#666",
            foreground_strong="#444",
            foreground_subtle="#999",
            colors=tuple(colours * 2 if areas else colours),
            guide_stroke_color="#8884",
            major_guide_stroke_color="#8888",
            font_family=FONTS,
            title_font_size=15,
            legend_font_size=14,
            stroke_width=2,
        ),
        css=["file://style.css", "file://graph.css", "inline:" + DARK + (_bands(colours) if areas else "")],
        legend_at_bottom=True,
        # pygal leaves no room for a row that is not full.
        legend_at_bottom_columns=max(1, min(4, len(areas) + len(curves), 600 // (8 * max(map(len, curves)) + 30))),
        truncate_legend=-1,
        js=[],  # pygal's own script would come from the network
        no_prefix=True,
        width=720,
        height=420,
    )
    along = {x for points in curves.values() for x, _ in points}
    if axes.log_x:
        chart.x_labels = _labels(along)
    elif max(along) - min(along) < _FEW and all(float(x).is_integer() for x in along):
        chart.x_labels = list(range(int(min(along)), int(max(along)) + 1))  # pygal would take halves
    if axes.log_y:
        ends = [place_y(y) for points in [*areas.values(), *curves.values()] for _, y in points]
        chart.y_labels = _labels(10.0**power for power in range(math.floor(min(ends)), math.ceil(max(ends)) + 1))
    for points in areas.values():
        chart.add(None, [(place_x(x), place_y(y)) for x, y in points], show_dots=False)
    for name, points in curves.items():
        chart.add(name, [(place_x(x), place_y(y)) for x, y in points], show_dots=len(points) == 1)
    # Comments hold the date; without them equal curves give equal bytes.
    return Picture(re.sub(r"<!--.*?-->", "", str(chart.render(is_unicode=True)), flags=re.DOTALL))


def _labels(values: Iterable[float]) -> list[dict[str, object]]:
    """Labels of a logarithmic axis."""
    return [{"value": math.log10(value), "label": f"{value:g}"} for value in sorted(values)]


def _bands(colours: Sequence[str]) -> str:
    """CSS of the first series, the bands: filled, without a line."""
    return "".join(
        f".serie-{number} .nofill {{ fill: {colour}; fill-opacity: 0.13; stroke: none }}"
        for number, colour in enumerate(colours)
    )


def draw_forecasts(found: Mapping[str, Forecast]) -> Picture:
    """Draw forecasts, by name, over the hours: their accuracy where they trained, else their committed rounds."""
    if all(one.accuracy for one in found.values()):
        trained = {name: one.accuracy for name, one in found.items()}
        return draw_curves(trained, Axes(x="hour", y="accuracy, unseen users", title="in virtual time"))
    curves = {name: list(enumerate(itertools.accumulate(one.rounds_by_hour, initial=0))) for name, one in found.items()}
    return draw_curves(curves, Axes(x="hour", y="rounds done", title="in virtual time"))


_CELLS = " ▀▄█"
_INK = 0.4
"""The level from which a cell is inked: a digit of 8 × 8 cells is then easiest to read."""


def drawn_in_characters(levels: Sequence[Sequence[float]]) -> list[str]:
    """The lines of a picture with 2n rows of m levels, 0 to 1: n lines of m characters."""
    inked = [[level > _INK for level in row] for row in levels]
    halves = zip(inked[::2], inked[1::2], strict=True)
    return ["".join(_CELLS[up + 2 * down] for up, down in zip(*rows, strict=True)) for rows in halves]


# Heat maps, bars of an answer and users' labels as SVG pictures.


CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, BELOW = 64, 34, 110, 44, 50


def draw_heat_map(
    title: str,
    rows: tuple[str, Sequence[str]],
    columns: tuple[str, Sequence[str]],
    values: Sequence[Sequence[float | None]],
) -> Picture:
    """Draw a heat map. rows, columns: the name of a setting, and its values.

    values: by row, then by column, darker where larger; None, left white, where training diverged.
    """
    numbers = [value for row in values for value in row if value is not None]
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    width = LEFT + CELL_WIDTH * len(columns[1]) + 20
    height = TOP + CELL_HEIGHT * len(rows[1]) + BELOW
    parts = [text_at(width / 2, 24, title)]
    for at, (label, row) in enumerate(zip(rows[1], values, strict=True)):
        y = TOP + CELL_HEIGHT * at
        parts.append(text_at(LEFT - 24, y + 22, label))
        for column, value in enumerate(row):
            parts += _cell(LEFT + CELL_WIDTH * column, y, value, (low, high))
    bottom = TOP + CELL_HEIGHT * len(rows[1])
    parts += [text_at(LEFT + CELL_WIDTH * (at + 0.5), bottom + 18, label) for at, label in enumerate(columns[1])]
    parts.append(text_at(LEFT + CELL_WIDTH * len(columns[1]) / 2, bottom + 40, columns[0]))
    parts.append(text_upwards(20, TOP + CELL_HEIGHT * len(rows[1]) / 2, rows[0]))
    return picture_of(width, height, parts)


def _cell(x: float, y: float, value: float | None, ends: tuple[float, float]) -> list[str]:
    low, high = ends
    share = 0.0 if value is None or high == low else (value - low) / (high - low)
    fill = "#ffffff" if value is None else shade(share)
    box = f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{fill}" stroke="{GREY}"/>'
    text = "–" if value is None else f"{value:.3g}"
    return [box, text_at(x + CELL_WIDTH / 2, y + 22, text, "#ffffff" if share > 0.55 else "#222222")]


_SHADES = ((0xE8, 0x08), (0xF1, 0x45), (0xFA, 0x94))
"""Red, green and blue, each of the smallest and the largest number."""


def shade(share: float) -> str:
    """The colour of a cell, light for 0 and dark for 1."""
    return "#" + "".join(f"{round(light + share * (dark - light)):02x}" for light, dark in _SHADES)


def text_at(x: float, y: float, text: str, colour: str = GREY, attributes: str = "") -> str:
    """Text centred at x."""
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{colour}"{attributes}>{escape(text)}</text>'


def text_upwards(x: float, y: float, text: str) -> str:
    """Text that reads upwards, centred at y."""
    return text_at(x, y, text, attributes=f' transform="rotate(-90 {x} {y})"')


def picture_of(width: float, height: float, parts: Iterable[str]) -> Picture:
    """A picture of SVG elements."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONTS}" font-size="13">'
    )
    return Picture("\n".join([head, *parts, "</svg>\n"]))


BARS_LEFT, BARS_TOP, BARS_WIDTH, BARS_HEIGHT, BARS_GAP, LABELS = 60, 40, 560, 180, 60, 24
"""The sizes of a panel, and the most groups that are named below it."""


def draw_answer(answer: Answer) -> Picture:
    """Draw the columns of numbers of an answer over its groups, which the other columns name."""
    numbers = [column for column in range(len(answer.columns)) if _is_number(answer, column)]
    keys = [column for column in range(len(answer.columns)) if column not in numbers]
    if not keys and len(numbers) > 1 and len(answer.rows) > 1:
        keys, numbers = numbers[:1], numbers[1:]  # whole keys are numbers too
    names = [", ".join(str(row[key]) for key in keys) for row in answer.rows]
    parts: list[str] = []
    for place, column in enumerate(numbers):
        top = BARS_TOP + place * (BARS_HEIGHT + BARS_GAP)
        parts += _panel(answer, column, names, top)
    return picture_of(BARS_LEFT + BARS_WIDTH + 20, BARS_TOP + max(len(numbers), 1) * (BARS_HEIGHT + BARS_GAP), parts)


def _is_number(answer: Answer, column: int) -> bool:
    values = [row[column] for row in answer.rows if row[column] is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _panel(answer: Answer, column: int, names: list[str], top: float) -> list[str]:
    values = [float(row[column] or 0) for row in answer.rows]
    low, high = min(0.0, *values), max(0.0, *values)
    scale = BARS_HEIGHT / ((high - low) or 1.0)
    base, width = top + high * scale, BARS_WIDTH / len(values)
    parts = [text_at(BARS_LEFT + BARS_WIDTH / 2, top - 12, visible(answer.columns[column]))]
    every = 1 + (len(values) - 1) // LABELS
    for index, value in enumerate(values):
        x = BARS_LEFT + index * width
        y, height = (base - value * scale, value * scale) if value >= 0 else (base, -value * scale)
        parts.append(
            f'<rect x="{x + 0.1 * width:.2f}" y="{y:.2f}" width="{0.8 * width:.2f}" height="{height:.2f}" '
            f'fill="{shade(0.7)}"><title>{visible(names[index])}: {value:g}</title></rect>'
        )
        error = None if answer.errors is None else answer.errors[index][column]
        if error is not None:
            middle, reach = x + width / 2, error * scale
            parts.append(
                f'<path d="M{middle:.2f} {base - value * scale - reach:.2f}v{2 * reach:.2f}" stroke="{GREY}"/>'
            )
        if names[index] and index % every == 0:
            parts.append(text_at(x + width / 2, top + BARS_HEIGHT + 18, visible(names[index])))
    parts.append(text_at(BARS_LEFT / 2, top + 4, f"{high:.4g}"))
    parts.append(f'<path d="M{BARS_LEFT} {base:.2f}h{BARS_WIDTH}" stroke="{GREY}"/>')
    return parts


MIX_LEFT, MIX_TOP, MIX_WIDTH, MIX_HEIGHT, MIX_GAP, TOTALS, MIX_BELOW = 40, 44, 560, 400, 20, 100, 50
ROWS = 200
"""The most users drawn, evenly spaced; more rows would be too thin to see."""


def draw_label_mix(counts: NDArray[np.int64], title: str) -> Picture:
    """Draw the shares of labels. counts: of each class at each user (users, classes).

    Users with the same largest class stand together.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    order = np.lexsort((-shares.max(1), shares.argmax(1)))
    order = order[np.linspace(0, len(order) - 1, min(len(order), ROWS)).astype(int)]
    height, width = MIX_HEIGHT / len(order), MIX_WIDTH / counts.shape[1]
    totals = counts[order].sum(1)
    parts = [_box(MIX_LEFT, MIX_TOP, MIX_WIDTH, MIX_HEIGHT, shade(0.0))]
    for at, user in enumerate(order):
        y = MIX_TOP + height * at
        parts += [
            _box(MIX_LEFT + width * label, y, width, height, shade(float(share)))
            for label, share in enumerate(shares[user])
            if share
        ]
        parts.append(
            _box(MIX_LEFT + MIX_WIDTH + MIX_GAP, y, TOTALS * int(totals[at]) / max(int(totals.max()), 1), height, GREY)
        )
    bottom = MIX_TOP + MIX_HEIGHT
    parts += [
        text_at(MIX_LEFT + width * (label + 0.5), bottom + 18, str(label))
        for label in range(0, counts.shape[1], 1 + counts.shape[1] // 24)
    ]
    parts += [
        text_at(MIX_LEFT + MIX_WIDTH / 2, 24, f"{title}: share of each user's labels"),
        text_at(MIX_LEFT + MIX_WIDTH / 2, bottom + 40, "class"),
        text_upwards(24, MIX_TOP + MIX_HEIGHT / 2, "user, by largest class"),
        text_at(MIX_LEFT + MIX_WIDTH + MIX_GAP + TOTALS / 2, bottom + 18, f"labels, to {totals.max():,}"),
    ]
    return picture_of(MIX_LEFT + MIX_WIDTH + MIX_GAP + TOTALS + MIX_GAP, bottom + MIX_BELOW, parts)


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"/>'
