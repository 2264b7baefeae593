"""Curves of runs as a picture: a line for each, with a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from fedcore.private_files import write_whole

Curve = tuple[Sequence[float], Sequence[float]]
LEGEND_WITHIN = 8
"""So many names fit in the picture; more stand beside it."""


class Picture(Figure):
    """A figure that a notebook shows by itself, without matplotlib's interactive part."""

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def draw_runs(curves: Mapping[str, Curve], axes: tuple[str, str], path: Path) -> None:
    """Write curves, x and y of each by name, in the format of the file's ending. Equal curves give equal bytes.

    axes: what x and y are.
    """
    write_figure(figure_of(curves, axes), path)


def figure_of(curves: Mapping[str, Curve], axes: tuple[str, str]) -> Picture:
    """A figure of curves, x and y of each by name. axes: what x and y are."""
    figure = Picture(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    plane = figure.subplots()
    for name, (xs, ys) in curves.items():
        plane.plot(xs, ys, label=name, marker="." if len(xs) == 1 else None)
    plane.set(xlabel=axes[0], ylabel=axes[1])
    plane.grid(alpha=0.3)
    plane.spines[["top", "right"]].set_visible(False)
    if len(curves) <= LEGEND_WITHIN:
        plane.legend()
    else:
        figure.legend(loc="outside right upper", fontsize="small")
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's ending. Equal figures give equal bytes. Raises NotWritten."""
    made = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": "muster", "svg.fonttype": "none"}):
        data = BytesIO()
        figure.savefig(data, format=path.suffix[1:], metadata=made.get(path.suffix))
    write_whole(path, data.getvalue())
