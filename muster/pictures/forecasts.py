"""A picture of forecasts: rounds that are done, or accuracy, over virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from muster.pictures.curves import Axes, draw_curves
from muster.pictures.picture import Picture

if TYPE_CHECKING:
    from simulator.forecast.forecast import Forecast


def draw_forecasts(found: Mapping[str, Forecast]) -> Picture:
    """Draw forecasts, by name, over the hours: their accuracy where they trained, else their committed rounds."""
    if all(one.accuracy for one in found.values()):
        trained = {name: one.accuracy for name, one in found.items()}
        return draw_curves(trained, Axes(x="hour", y="accuracy, unseen users", title="in virtual time"))
    curves = {name: list(enumerate(itertools.accumulate(one.rounds_by_hour, initial=0))) for name, one in found.items()}
    return draw_curves(curves, Axes(x="hour", y="rounds done", title="in virtual time"))
