"""Figures of a study, for papers and slides: its grids as heat maps, its plots as curves in bands."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from matplotlib.figure import Figure

from muster.pictures.heat_map_figure import heat_map_figure
from muster.study_report import Report, map_of, numbered
from simulator.studies.study import Plot


def figures(report: Report) -> Mapping[str, Figure]:
    """The figure of each picture by file name."""
    findings = report.findings
    drawn = [heat_map_figure(*map_of(grid)) for grid in findings.grids] + [_curves(plot) for plot in findings.plots]
    return numbered(report, drawn, "png")


def _curves(plot: Plot) -> Figure:
    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name, points in plot.curves.items():
        there = [(x, known) for x, values in points if (known := [value for value in values if value is not None])]
        xs = [x for x, _ in there]
        (line,) = axes.plot(xs, [statistics.fmean(known) for _, known in there], label=name)
        low, high = ([end(known) for _, known in there] for end in (min, max))
        axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.13, linewidth=0)
    scales = ("log" if log else "linear" for log in (plot.log_x, plot.log_y))
    axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y, **dict(zip(("xscale", "yscale"), scales, strict=True)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure
