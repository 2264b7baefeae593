"""Private sums: how the sums of a round are encoded and noised, and when a budget is spent. Pure.

Legend: L values of a report, M of them in mean segments. Spec: docs/spec/privacy.md.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from coordinator.errors import InvalidTask, demand
from coordinator.rules.aggregation import Vectors
from coordinator.rules.task_settings import Secagg, TaskSettings
from fedcore.algorithms.algorithm import Algorithm, Trip
from fedcore.codecs import keep_norms
from fedcore.compression import upload_bytes
from fedcore.errors import PrivacyError
from fedcore.masking import fixed_points, least_square
from fedcore.params import FLOAT_BYTES
from fedcore.plan import Plan
from fedcore.privacy.accounting import calibrated, check_private as check_sums, spent
from fedcore.privacy.settings import LedgerEntry, Noise, Privacy
from fedcore.release import CLIP, SumBounds
from fedcore.report import WEIGHT, ReportLayout
from secagg.errors import HeadroomError
from secagg.masking import RARE_BITS
from secagg.packing import MOST_FIELD_BITS, WORD_BITS, PackedSegment, check_headroom, field_bits, with_noise, word_count

# Packed segments: how the sums of a secure round are encoded, and whether the noise of its devices fits. Pure.
#
# Spec: docs/spec/wire.md §8. And how long a report is, which follows from them.


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


# Keyed normal numbers: noise from the system's cryptographic generator, which its key makes again.
#
# A stream of ChaCha20 becomes uniform numbers of 53 bits, and pairs of these normal ones by Box and Muller 1958. So no
# number of a sum tells anything about another one, and the tail reaches to 8.5 standard deviations.

KEY_BYTES = 32
_PAIRS = 1 << 15
"""Pairs that are made at once, in a core's second cache."""
_BITS = 53


class KeyedNormals:
    """Standard normal numbers, one after the other: the same ones for the same key of KEY_BYTES."""

    def __init__(self, key: bytes) -> None:
        self._stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    @classmethod
    def fresh(cls) -> KeyedNormals:
        """Numbers that cannot be made again."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def standard_normal(self, size: int) -> NDArray[np.float64]:
        """The next `size` numbers, float64 (size,). An odd size leaves one unused."""
        normals = np.empty(size + size % 2)
        for begin in range(0, normals.size, 2 * _PAIRS):
            block = normals[begin : begin + 2 * _PAIRS]
            radius, angle = self._uniform(block.size).reshape(2, -1)
            np.log(radius, out=radius)
            radius *= -2
            np.sqrt(radius, out=radius)
            angle *= 2 * np.pi
            np.multiply(radius, np.cos(angle), out=block[: radius.size])
            np.multiply(radius, np.sin(angle), out=block[radius.size :])
        return normals[:size]

    def _uniform(self, size: int) -> NDArray[np.float64]:
        """Multiples of 2^-53, above 0 and up to 1."""
        words = np.frombuffer(self._stream.update(bytes(8 * size)), np.uint64) >> np.uint64(64 - _BITS)
        uniform: NDArray[np.float64] = (words + np.uint64(1)).astype(np.float64)
        uniform *= 2.0**-_BITS
        return uniform


Floats = NDArray[np.float64]
GRID = 2.0**-32
"""The grid that sums and noise are rounded to, in standard deviations of the noise."""
ROUNDING = 0.25
"""The greatest variance of a value that is rounded at random to one of its neighbouring steps, in squared steps."""
MOST_ROUNDS, MOST_EPSILON = 100_000, 1e6
"""For how many rounds, and up to which ε, noise is found: rounds take time and memory, and the solver has its range."""


def with_least_noise(settings: TaskSettings) -> TaskSettings:
    """The settings with a noise multiplier, where they promise privacy without: the least that keeps their budget.

    With it the budget lasts for all rounds. Noise of devices counts with the coarse steps of masked values. Raises
    InvalidTask, and PrivacyError without an accountant.
    """
    budget = settings.privacy
    if budget is None or budget.noise_multiplier is not None:
        return settings
    wording = f"at most {MOST_ROUNDS} where the noise is to be found: give noise_multiplier for more"
    demand(settings.rounds <= MOST_ROUNDS, "rounds", wording, settings.rounds)
    wording = f"at most {MOST_EPSILON:g} where the noise is to be found: give noise_multiplier for more"
    demand(budget.epsilon <= MOST_EPSILON, "epsilon", wording, budget.epsilon)
    noise = planned(settings, budget.promise(1.0, settings.min_separation_rounds))
    least = calibrated(noise, settings.rounds, budget.epsilon, budget.delta)
    return replace(settings, privacy=replace(budget, noise_multiplier=least))


def planned(settings: TaskSettings, promise: Privacy) -> Noise:
    """The noise of a task's rounds before there are any: that of devices with the coarsest steps of masked values."""
    if promise.mechanism != "distributed":
        return promise
    square = least_square((settings.secagg or Secagg()).bits)
    return LedgerEntry(**_noise_of(promise), round=0, clip=1.0, devices=0, square=square)


def as_asked(settings: TaskSettings) -> TaskSettings:
    """The settings without what followed from others: a minimum that is the goal, and the least noise.

    A task with some of them changed has these as they follow then. Raises as `with_least_noise`.
    """
    if settings.minimum == settings.goal:
        settings = replace(settings, minimum=None)
    if settings.privacy is None:
        return settings
    without = replace(settings, privacy=replace(settings.privacy, noise_multiplier=None))
    found = settings.rounds <= MOST_ROUNDS and settings.privacy.epsilon <= MOST_EPSILON
    return without if found and with_least_noise(without).privacy == settings.privacy else settings


def clip_of(trip: Trip, state: Vectors) -> float:
    """The bound on the l2 norm of a report that the devices of a round were sent."""
    return float(trip.broadcast(state)[CLIP][0])


def check_private(settings: TaskSettings, algorithm: Algorithm, plan: Plan) -> None:
    """Raise InvalidTask, saying what to change, unless the algorithm's reports are bounded and the budget has room.

    Of the task's first rounds there must be room for one of every trip.
    """
    privacy = settings.promise
    try:
        check_sums(privacy, algorithm)
    except PrivacyError as error:
        raise InvalidTask(str(error)) from error
    if not all(trip.report.bounded for trip in plan.trips):
        raise InvalidTask(
            "privacy needs reports that devices hold to a bound, and those of the plan are not: export it anew"
        )
    segments = [segment for trip in plan.trips for segment in trip.report.segments]
    if not privacy.noise_of_devices and not all(keep_norms(segment.codecs) for segment in segments):
        raise InvalidTask("privacy needs codecs that keep the length of a report: export the plan with rotation alone")
    first = spent([_expected(settings, trip.report) for trip in plan.trips], privacy.delta)
    if first > privacy.epsilon:
        alone = "the first round alone spends" if len(plan.trips) == 1 else "the first round of every trip spends"
        raise InvalidTask(
            f"with noise_multiplier {privacy.noise_multiplier:g} {alone} ε {first:.3g} at δ {privacy.delta:g}, and the "
            f"budget is {privacy.epsilon:g}: raise one of the two"
        )


def noise_size(layout: ReportLayout) -> int:
    """M: how many values of a report get noise."""
    return sum(segment.size for segment in layout.means)


def counted(layout: ReportLayout, total_L: Floats, count: int) -> Floats:
    """The summed report (L,) with `count` in place of the summed weight, by which the mean is divided."""
    counted_L = total_L.copy()
    for segment, where in layout.slices():
        if segment.name == WEIGHT:
            counted_L[where] = count
    return counted_L


def add_noise(layout: ReportLayout, total_L: Floats, noise_M: Floats, deviation: float) -> Floats:
    """The summed report (L,) with noise on its mean segments.

    deviation: the standard deviation of the noise. Sums and noise are rounded to a grid of GRID times that, so that the
    last bits of a number say nothing of what was added to what (Mironov, "On significance of the least significant
    bits for differential privacy", CCS 2012).
    """
    noisy_L, begin = total_L.copy(), 0
    grid = GRID * 2.0 ** math.floor(math.log2(deviation))
    for segment, where in layout.slices():
        if segment.reduction == "mean":
            noise = noise_M[begin : begin + segment.size]
            noisy_L[where] = (np.rint(total_L[where] / grid) + np.rint(noise / grid)) * grid
            begin += segment.size
    return noisy_L


def entry_of(privacy: Privacy, number: int, clip: float, devices: int) -> LedgerEntry:
    """The row of a round whose noise the coordinator adds."""
    return LedgerEntry(**_noise_of(privacy), round=number, clip=clip, devices=devices)


def entry_of_devices(settings: TaskSettings, layout: ReportLayout, number: int, devices: int) -> LedgerEntry:
    """The row of a round whose noise its devices add. layout: of the reports as they travel."""
    (honest, square), secagg = honest_devices_and_norm(layout, settings, number), settings.secagg or Secagg()
    facts = _noise_of(settings.promise)
    return LedgerEntry(**facts, round=number, clip=secagg.clip_norm, devices=devices, honest=honest, square=square)


def _expected(settings: TaskSettings, layout: ReportLayout) -> LedgerEntry:
    """The row of a round that has not been run, with such reports; its bound is not known, and does not matter."""
    if settings.promise.noise_of_devices:
        return entry_of_devices(settings, layout, 1, settings.goal)
    return entry_of(settings.promise, 1, 1.0, settings.goal)


def _noise_of(noise: Noise) -> dict[str, Any]:
    return {name: getattr(noise, name) for name in Noise.__struct_fields__}


def deviation_of(entries: Sequence[LedgerEntry], settings: TaskSettings, layout: ReportLayout) -> float:
    """The standard deviation of the noise in every number of these rounds' sums, added up; 0 of no rounds.

    layout: of the reports as they travel. Trap: for noise that is drawn anew in every round. Devices' noise is that of
    all who reported, with what the rounding of their values adds.
    """
    variance = 0.0
    for entry in entries:
        if entry.mechanism != "distributed":
            variance += (entry.noise_multiplier * entry.clip) ** 2
            continue
        n_max = most_in_group(settings, entry.round)
        (segment,) = packed_segments(layout, settings.sum_bounds, n_max)
        variance += entry.devices * (segment.noise + ROUNDING) * segment.step**2
    return math.sqrt(variance)


def may_go_on(privacy: Privacy, entries: Sequence[LedgerEntry]) -> bool:
    """Whether the budget has room for one more round, like the last one of these."""
    return spent([*entries, entries[-1]], privacy.delta) <= privacy.epsilon
