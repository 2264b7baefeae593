"""The longest update that a task counts, and sums of secure rounds that are held to it. Pure.

Spec: docs/spec/rounds.md §8. Legend: L values of a decoded report.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.clear_reports import longest
from coordinator.rules.task_settings import TaskSettings
from fedcore import codecs
from fedcore.plan import Plan
from fedcore.report import WEIGHT, ReportLayout


def in_words(plan: Plan, settings: TaskSettings) -> str:
    """The L2 norm above which an update of a task, decoded and over its weight, is scaled down; empty with noise.

    Noise of devices may be any part of a sum.
    """
    if settings.secagg is not None and settings.privacy is not None:
        return ""
    norm = settings.clear.max_norm if settings.secagg is None else settings.secagg.clip_norm
    segments = [one for trip in plan.trips for one in trip.report.segments if one.reduction == "mean"]
    most = f"{max(longest(one, norm) for one in segments):,.4g}"
    counted = "its update" if settings.secagg is None else "the mean of a round"
    return f" Decoded, {counted} counts with a length of {most} at most."


def held_sum(settings: TaskSettings, layout: ReportLayout, decoded_L: NDArray[np.float64]) -> NDArray[np.float64]:
    """A decoded sum with its mean segments no longer than one report's may be; of reports in clear each was bounded.

    layout: of the reports as they travel. Secure aggregation holds sums whose norms codecs keep.
    """
    if settings.secagg is None or settings.privacy is not None:
        return decoded_L
    slices = layout.decoded.slices()
    weight = next(float(decoded_L[where][0]) for segment, where in slices if segment.name == WEIGHT)
    held_L = decoded_L.copy()
    for segment, (_, where) in zip(layout.segments, slices, strict=True):
        if segment.reduction == "mean" and not codecs.keep_norms(segment.codecs):
            norm, most = float(np.linalg.norm(held_L[where])), weight * longest(segment, settings.secagg.clip_norm)
            held_L[where] *= min(1.0, most / norm) if norm else 1.0
    return held_L
