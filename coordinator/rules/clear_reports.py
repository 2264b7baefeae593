"""Reports in the clear: the bounds on each of them, so that no single device decides the next model. Pure.

Legend: L values of a report. Spec: docs/spec/rounds.md §8.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import ClearReports
from fedcore import codecs
from fedcore.codecs.codec import RoundKey
from fedcore.params import FLOAT_BYTES
from fedcore.ranges import Range
from fedcore.report import WEIGHT, ReportLayout, Segment

SLACK = 2.0
"""How far above its average length an honest update may be when decoded: which part of it travels is random."""
MOST_KEPT, MOST_KEPT_BYTES = 500, 1 << 28
"""The most reports of a round that are kept one by one, and their memory: the driver reads all when the round ends."""


def check_room(clear: ClearReports, layout: ReportLayout, goal: int) -> None:
    """Raise InvalidTask when the reports of a round are more than may be kept one by one."""
    most = min(MOST_KEPT, MOST_KEPT_BYTES // (layout.size * FLOAT_BYTES))
    if clear.estimator != "mean" and goal > most:
        raise InvalidTask(
            f"estimator {clear.estimator} keeps every report of a round, and of {layout.size:,} values it may keep "
            f"{most}: lower the goal from {goal} to that, take a smaller model, or the mean"
        )


def bounded_report(
    clear: ClearReports, report_L: NDArray[np.floating[Any]], layout: ReportLayout, key: RoundKey
) -> NDArray[np.floating[Any]]:
    """A report (L,) within the bounds: the same array when it is, else a copy that is scaled down or clamped.

    Each value of a segment with a range is held to it. A weight that is too great scales the whole report, so that
    means and metrics count as those of the lower one.
    key: of the codecs of the report's round.
    """
    slices = layout.slices()
    weight = next(float(report_L[where][0]) for segment, where in slices if segment.name == WEIGHT)
    heavy = weight > clear.max_weight
    factors = [
        (where, _factor(clear.max_norm * weight, segment, report_L[where], key, index))
        for index, (segment, where) in enumerate(slices)
        if segment.normed
    ]
    long = [(where, factor) for where, factor in factors if factor < 1]
    beyond = [
        (where, within)
        for segment, where in slices
        if (within := segment.range) is not UNSET and _leaves(within, report_L[where])
    ]
    if not heavy and not long and not beyond:
        return report_L
    bounded_L = report_L.astype(np.float64)
    for where, factor in long:
        bounded_L[where] *= factor
    for where, within in beyond:
        bounded_L[where] = np.clip(bounded_L[where], within.low, within.high)
    if heavy:
        bounded_L *= clear.max_weight / weight
    return bounded_L


def _factor(most: float, segment: Segment, values_C: NDArray[np.floating[Any]], key: RoundKey, index: int) -> float:
    """The factor that brings a mean segment within the L2 norm `most`; 1 if it is. index: its place in the layout."""
    stretch = codecs.stretch(segment.codecs)
    norms = [(_norm(values_C), most if stretch == 1 else SLACK * stretch * most)]
    if not codecs.keep_norms(segment.codecs):
        # In float64, in which what is made of finite float32 overflows nowhere.
        decoded = codecs.decoded_norm(segment.codecs, values_C.astype(np.float64), segment.size, key, index)
        norms.append((decoded, longest(segment, most)))
    return min([1.0, *(most / norm for norm, most in norms if norm > most)])


def _leaves(within: Range, values: NDArray[np.floating[Any]]) -> bool:
    """Whether a value is outside the range, whose ends are rounded to the values' precision as on a device."""
    return bool((values < within.low).any() or (values > within.high).any())


def longest(segment: Segment, norm: float) -> float:
    """The L2 norm to which a decoded mean segment is held where an update that is `norm` long must pass.

    Codecs send a part of an update and scale it up: decoded, it is √growth times as long on average. A false report
    made for that is growth times as long.
    """
    if codecs.keep_norms(segment.codecs):
        return norm
    growth = codecs.growth(segment.codecs, segment.size)
    return norm * min(growth, SLACK * math.sqrt(growth))


def _norm(values: NDArray[np.floating[Any]]) -> float:
    """The L2 norm; in the values' own precision, as long as their squares neither overflow nor vanish in it."""
    with np.errstate(over="ignore", under="ignore"):
        square = float(values @ values)
    precision = np.finfo(values.dtype)
    # What vanishes is at most the smallest normal number for each value: below this it could be part of the norm.
    least = values.size * float(precision.tiny) / float(precision.eps)
    if least <= square < math.inf:
        return math.sqrt(square)
    return float(np.linalg.norm(values.astype(np.float64))) if values.any() else 0.0
