"""A picture of forecasts: rounds that are done, over virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster.pictures.curves import Axes, draw_curves
from muster.pictures.picture import Picture

if TYPE_CHECKING:
    from simulator.forecast.forecast import Forecast


def draw_forecasts(found: Mapping[str, Forecast]) -> Picture:
    """Draw the committed rounds of forecasts, by name, over the hours."""
    curves = {name: list(enumerate(itertools.accumulate(one.rounds_by_hour, initial=0))) for name, one in found.items()}
    return draw_curves(curves, Axes(x="hour", y="rounds done", title="in virtual time"))
