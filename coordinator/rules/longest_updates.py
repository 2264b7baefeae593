"""The longest update that a task counts, and the sums of secure rounds that are held to it. Pure.

Spec: docs/spec/rounds.md §8. Legend: L values of a decoded report.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.clear_reports import longest
from coordinator.rules.task_settings import TaskSettings
from fedcore import codecs
from fedcore.masking import fixed_point, greatest_weight
from fedcore.plan import Plan
from fedcore.report import WEIGHT, ReportLayout


def in_words(plan: Plan, settings: TaskSettings) -> str:
    """The L2 norm above which an update of a task, decoded and over its weight, is scaled down; empty with noise.

    With noise of devices there is no such norm: noise may be any part of a sum. Nor is there where all segments have
    ranges.
    """
    if settings.secagg is not None and settings.privacy is not None:
        return ""
    norm = settings.clear.max_norm if settings.secagg is None else settings.secagg.clip_norm
    segments = [segment for trip in plan.trips for segment in trip.report.segments if segment.normed]
    if not segments:
        return ""
    most = f"{max(longest(segment, norm) for segment in segments):,.4g}"
    if settings.secagg is None:
        return f" Decoded, its update counts with a length of {most} at most."
    return f" Decoded, the mean of a round counts with a length of {most} at most, and what rounding adds."


def held_sum(
    settings: TaskSettings, layout: ReportLayout, decoded_L: NDArray[np.float64], devices: int
) -> NDArray[np.float64]:
    """A decoded sum of masked reports with its mean segments scaled down to what honest devices may come to.

    layout: of the reports as they travel. devices: whose reports they are. Reports in the clear were bounded one by
    one, and secure aggregation has bounded segments whose norms codecs keep.
    """
    if settings.secagg is None or settings.privacy is not None:
        return decoded_L
    ranges = dict(zip((segment.name for segment in layout.segments), layout.decoded.slices(), strict=True))
    weight, w_max = float(decoded_L[ranges[WEIGHT][1]][0]), greatest_weight(layout, settings.sum_bounds)
    held_L = decoded_L.copy()
    for segment in layout.unweighted:
        if segment.normed and not codecs.keep_norms(segment.codecs):
            # The deviation of a value that is rounded at random is half a step at most. Twice that is slack.
            rounding = w_max * fixed_point(segment, settings.sum_bounds).step * math.sqrt(devices * segment.coded_size)
            most = weight * longest(segment, settings.secagg.clip_norm)
            most += codecs.growth(segment.codecs, segment.size) * rounding
            where = ranges[segment.name][1]
            norm = float(np.linalg.norm(held_L[where]))
            held_L[where] *= min(1.0, most / norm) if norm else 1.0
    return held_L
