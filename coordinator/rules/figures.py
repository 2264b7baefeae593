"""Figures of an evaluation as a table: means with their intervals, percentiles, shares. Names: `fedcore.figures`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fedcore.figures import PERCENTILES


class Interval(NamedTuple):
    """A mean, and the ends of its interval of 95 %, which one device alone has none of."""

    mean: float
    low: float | None
    high: float | None

    @property
    def words(self) -> str:
        """The interval; empty without one."""
        return "" if self.low is None or self.high is None else f"{self.low:.4g} to {self.high:.4g}"


class Row(NamedTuple):
    """The figures of a metric. percentiles: over devices, of `PERCENTILES`. improved: the share of devices, 0 to 1."""

    metric: str
    over_examples: Interval | None
    over_devices: Interval | None
    percentiles: tuple[float, ...]
    improved: float | None


class Figures(NamedTuple):
    """What an evaluation found. kind: evaluate, compare or personalisation; counts: of devices and of examples."""

    kind: str
    devices: int
    examples: int
    rows: tuple[Row, ...]

    @property
    def sentence(self) -> str:
        """What the means are of."""
        counted = f"{self.devices:,} devices with {self.examples:,} examples"
        if self.kind == "evaluate":
            return f"on {counted}, with intervals of 95 %; a tenth of the devices is below p10, and so on"
        what = (
            "evaluated model minus the other" if self.kind == "compare" else "after training on the device minus before"
        )
        return f"differences, {what}, on {counted}; an interval of 95 % with 0 in it shows no difference"


def figures_of(kind: str, metrics: Mapping[str, float]) -> Figures | None:
    """The figures that an algorithm called `kind` left among the metrics of a round; None where it left none."""
    devices = metrics.get(f"{kind}.devices")
    rows = tuple(_row(f"{kind}.{name}", name, metrics) for name in _names(kind, metrics))
    if devices is None or not rows:  # a question leaves its devices alone
        return None
    return Figures(kind, int(devices), int(metrics.get(f"{kind}.examples", 0)), rows)


def means_of(kind: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without the details of figures: intervals, percentiles and counts."""
    if f"{kind}.devices" not in metrics:
        return dict(metrics)
    return {name: metrics[name] for name in (f"{kind}.{metric}" for metric in _names(kind, metrics)) if name in metrics}


def _names(kind: str, metrics: Mapping[str, float]) -> list[str]:
    own = [name.removeprefix(f"{kind}.") for name in metrics if name.startswith(f"{kind}.")]
    return sorted({name.partition(".")[0] for name in own} - {"devices", "examples"})


def _row(name: str, metric: str, metrics: Mapping[str, float]) -> Row:
    found = tuple(metrics[place] for place in (f"{name}.p{percent}" for percent in PERCENTILES) if place in metrics)
    over = _interval(name, metrics), _interval(f"{name}.devices", metrics)
    return Row(metric, *over, found, metrics.get(f"{name}.improved"))


def _interval(name: str, metrics: Mapping[str, float]) -> Interval | None:
    if name not in metrics:
        return None
    return Interval(metrics[name], metrics.get(f"{name}.low"), metrics.get(f"{name}.high"))
