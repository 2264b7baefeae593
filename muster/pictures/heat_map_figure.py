"""Heat maps as figures: a cell for each pair of settings, darker where its number is larger."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure


def heat_map_figure(
    title: str,
    rows: tuple[str, Sequence[str]],
    columns: tuple[str, Sequence[str]],
    values: Sequence[Sequence[float | None]],
) -> Figure:
    """A heat map, of what `heat_map.draw_heat_map` takes."""
    numbers = np.array([[math.nan if value is None else value for value in row] for row in values])
    figure = Figure(figsize=(2 + 0.9 * len(columns[1]), 1.4 + 0.5 * len(rows[1])), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.imshow(numbers, aspect="auto", cmap="Blues")
    axes.set(title=title, xlabel=columns[0], ylabel=rows[0])
    axes.set_xticks(range(len(columns[1])), columns[1])
    axes.set_yticks(range(len(rows[1])), rows[1])
    middle = (np.nanmin(numbers) + np.nanmax(numbers)) / 2 if np.isfinite(numbers).any() else 0.0
    for (row, column), value in np.ndenumerate(numbers):
        words, colour = (
            ("–", "black") if math.isnan(value) else (f"{value:.3g}", "white" if value > middle else "black")
        )
        axes.text(column, row, words, ha="center", va="center", color=colour)
    return figure
