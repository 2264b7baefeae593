"""Packed segments: how the sums of a secure round are encoded, and whether the noise of its devices fits. Pure.

Spec: docs/spec/wire.md §8. And how long a report is, which follows from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import Secagg, TaskSettings
from fedcore.masking import fixed_points
from fedcore.params import FLOAT_BYTES
from fedcore.quantisation import upload_bytes
from fedcore.release import SumBounds
from fedcore.report import ReportLayout
from secagg.errors import HeadroomError
from secagg.masking import RARE_BITS
from secagg.packing import (
    MOST_FIELD_BITS,
    WORD_BITS,
    PackedSegment,
    check_headroom,
    field_bits,
    with_noise,
    word_count,
)


def packed_segments(layout: ReportLayout, bounds: SumBounds, n_max: int) -> tuple[PackedSegment, ...]:
    """The segments of a round of up to n_max devices in a group, in the narrowest fields."""
    segments = []
    for point in fixed_points(layout, bounds):
        widest = PackedSegment(
            point.size, MOST_FIELD_BITS, point.bits, point.low, point.high, point.norm, point.weighted
        )  # fmt: skip
        segment = with_noise(widest, bounds.noise_multiplier, bounds.honest)
        segments.append(replace(segment, field_bits=min(field_bits(segment, n_max), MOST_FIELD_BITS)))
    return tuple(segments)


def check_device_noise(layout: ReportLayout, settings: TaskSettings) -> None:
    """Refuse a task whose devices cannot add the noise that it asks them for.

    Raises InvalidTask saying why and what to change.
    """
    if not settings.sum_bounds.noise_multiplier:
        return
    if layout.weighting != "uniform":
        raise InvalidTask(
            "the plan weighs devices by examples, and the noise of devices hides each of them alike: export it for an "
            "algorithm with uniform weighting"
        )
    if not settings.sum_bounds.honest:
        raise InvalidTask(
            f"a sum may be over {settings.sum_bounds.min_sum} devices, and all of them may be corrupt, so that nobody "
            "is counted on to add noise: raise minimum, or lower over_selection or group_size"
        )
    for number in (1, settings.rounds):
        n_max = most_in_group(settings, number)
        try:
            check_headroom(packed_segments(layout, settings.sum_bounds, n_max), n_max)
        except HeadroomError as error:
            raise InvalidTask(
                f"the devices of round {number} cannot add the noise: {error}; raise minimum, or lower bits, "
                "over_selection or group_size"
            ) from error


def honest_devices_and_norm(layout: ReportLayout, settings: TaskSettings, number: int) -> tuple[int, int]:
    """The devices of a round that are relied on to add noise, and the greatest squared l2 norm of a report, in steps.

    The task must have noise of devices.
    """
    bounds, n_max = settings.sum_bounds, most_in_group(settings, number)
    return bounds.honest, packed_segments(layout, bounds, n_max)[0].most_square


def device_noise(layout: ReportLayout, settings: TaskSettings) -> str:
    """The noise of devices in the largest round of a task, in words; empty where they add none."""
    if not settings.sum_bounds.noise_multiplier:
        return ""
    n_max = most_in_group(settings, settings.rounds)
    (segment,) = packed_segments(layout, settings.sum_bounds, n_max)
    honest, _ = honest_devices_and_norm(layout, settings, settings.rounds)
    return (
        f"of {math.sqrt(segment.noise):.3g} steps from each device, enough with {honest} honest ones in a sum; fields "
        f"of {segment.field_bits} bits for {n_max} devices, in which a sum wraps around with a chance below "
        f"2^-{RARE_BITS}"
    )


@dataclass(frozen=True, slots=True)
class ReportBytes:
    """Bytes of a report as a device sends it, and of the same in float32."""

    sent: int
    uncompressed: int

    @property
    def words(self) -> str:
        """Both, for a reader; one where they are the same."""
        if self.sent == self.uncompressed:
            return f"{self.sent:,} bytes"
        times = self.uncompressed / self.sent
        compared = f"{times:.1f} times smaller" if times >= 1 else f"{1 / times:.1f} times larger"
        return f"{self.sent:,} bytes, {compared} than {self.uncompressed:,} in float32"


def report_bytes(layout: ReportLayout, settings: TaskSettings) -> ReportBytes:
    """How long a report of the task is, in its largest round: masked, or in the clear as its plan has it."""
    whole = FLOAT_BYTES * layout.decoded.size
    if settings.secagg is None:
        return ReportBytes(upload_bytes(layout), whole)
    n_max = most_in_group(settings, settings.rounds)
    return ReportBytes(WORD_BITS // 8 * word_count(packed_segments(layout, settings.sum_bounds, n_max)), whole)


def most_in_group(settings: TaskSettings, number: int) -> int:
    """How many devices a group of a secure round has at most."""
    return min(settings.in_round(number).policy.cohort, (settings.secagg or Secagg()).group_size)
