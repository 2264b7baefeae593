"""Learning curves as an SVG picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pygal
from pygal.style import Style

COLOURS = ("#1f77b4", "#d95f02", "#2ca02c")


def draw_curves(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Write the accuracies after rounds 1, 2, … of each algorithm, 0 to 1, as a curve each."""
    rounds = max(map(len, curves.values()))
    chart = pygal.Line(
        title="Handwritten digits, non-IID devices",
        x_title="round",
        y_title="accuracy, unseen users",
        range=(0, 1),
        style=Style(background="white", plot_background="white", colors=COLOURS, guide_stroke_color="#ccc"),
        legend_at_bottom=True,
        dots_size=2,
        show_minor_x_labels=False,
        js=[],  # pygal's own script would come from the network
        height=450,
    )
    chart.x_labels = [str(number) for number in range(1, rounds + 1)]
    chart.x_labels_major = [str(number) for number in range(5, rounds + 1, 5)] or chart.x_labels
    for name, curve in curves.items():
        chart.add(name, list(curve))
    chart.render_to_file(str(path))
