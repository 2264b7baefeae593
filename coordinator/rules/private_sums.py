"""Private sums: the noise on the sum of a round, and the round after which a task's budget is spent. Pure.

Legend: L values of a report, M of them in mean segments. Spec: docs/spec/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import InvalidTask, demand
from coordinator.rules.aggregation import Vectors
from coordinator.rules.packed_segments import honest_devices_and_norm, most_in_group, packed_segments
from coordinator.rules.task_settings import Secagg, TaskSettings
from fedcore.algorithms.algorithm import Algorithm, Trip
from fedcore.bound import CLIP
from fedcore.codecs import keep_norms
from fedcore.errors import PrivacyError
from fedcore.masking import least_square
from fedcore.plan import Plan
from fedcore.privacy.accounting import calibrated, spent
from fedcore.privacy.mechanisms import check_private as check_sums
from fedcore.privacy.settings import LedgerEntry, Noise, Privacy
from fedcore.report import WEIGHT, ReportLayout

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
