"""The sums of masked reports, as in the secure rounds of a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import InvalidTask
from coordinator.rules.aggregation import held_sum
from coordinator.rules.private_sums import check_device_noise, most_in_group, packed_segments
from coordinator.rules.release import check_masked_rounding
from coordinator.rules.task_settings import PrivacyBudget, Secagg, TaskSettings
from fedcore.algorithms.algorithm import Algorithm
from fedcore.batching import StreamKey, stream
from fedcore.codecs import RoundKey
from fedcore.masking import greatest_weight, join_weight
from fedcore.params import Float32
from fedcore.privacy.settings import Privacy
from fedcore.release import SumBounds
from fedcore.report import ReportLayout
from secagg.packing import Total, decode, encode
from simulator.errors import EngineError
from simulator.private_training import Cohorts

log = logging.getLogger(__name__)
_LABEL = b"muster.simulated-masking.v1"


def secure_task(
    secagg: Secagg,
    cohorts: Cohorts,
    rounds: int,
    layouts: Sequence[ReportLayout],
    privacy: Privacy | None = None,
) -> TaskSettings:
    """The settings of a task with such secure rounds. layouts: of its reports.

    Raises EngineError for settings that no task can have, or under which devices cannot add the noise.
    """
    names = ("epsilon", "delta", "users", "mechanism", "noise_multiplier")
    try:
        settings = TaskSettings(
            population="simulated",
            goal=cohorts.first,
            rounds=rounds,
            over_selection=1.0,
            min_separation_rounds=cohorts.separation,
            schedule=cohorts.schedule,
            secagg=secagg,
            privacy=None if privacy is None else PrivacyBudget(**{name: getattr(privacy, name) for name in names}),
        )
        for layout in layouts:
            check_device_noise(layout, settings)
    except InvalidTask as error:
        raise EngineError(f"secagg: {error}") from error
    return settings


def warn_of_rounding(
    settings: TaskSettings, algorithm: Algorithm, layouts: Sequence[ReportLayout], parameters: int
) -> None:
    """Log a warning if a task with this algorithm would be refused for its rounding; a simulation runs it."""
    try:
        check_masked_rounding(settings, algorithm, layouts, parameters)
    except InvalidTask as error:
        log.warning("a task with these settings would be refused: %s", error)


def square_of(secagg: Secagg, layout: ReportLayout) -> int:
    """The greatest squared l2 norm, in steps, of a report to which devices add noise of any size."""
    bounds = SumBounds(
        clip_norm=secagg.clip_norm, bits=secagg.bits, max_examples=1, min_sum=1, noise_multiplier=1.0, honest=1
    )
    return packed_segments(layout, bounds, n_max=1)[0].most_square


class MaskedSum:
    """The sum of a secure round of a task, group by group. layout: of its reports."""

    def __init__(self, settings: TaskSettings, layout: ReportLayout, number: int) -> None:
        bounds = settings.sum_bounds
        self._settings, self._layout, self._most = settings, layout, most_in_group(settings, number)
        self._segments = packed_segments(layout, bounds, self._most)
        self._w_max = greatest_weight(layout, bounds)
        self._totals: list[Total] = []
        self._words, self._devices, self._all = np.zeros(0, np.uint64), 0, 0

    def add(self, values_V: Float32, weight: float, key: StreamKey) -> None:
        """Add the unweighted values (V,) of a device. key: of its random streams."""
        words = encode(self._segments, values_V, min(int(weight), self._w_max), self._w_max, _keys(key))
        self._words = words if self._devices == 0 else self._words + words
        self._devices, self._all = self._devices + 1, self._all + 1
        if self._devices == self._most:
            self._end_group()

    def total(self, key: RoundKey) -> NDArray[np.float64]:
        """The summed report, decoded and held to its bounds as at the coordinator.

        Raises SumOutOfRange if a field was too narrow.
        """
        if self._devices:
            self._end_group()
        total = reduce(add, self._totals)
        decoded_L = self._layout.decode(join_weight(self._layout, total.weight, total.sums), key)
        return held_sum(self._settings, self._layout, decoded_L, self._all)

    def _end_group(self) -> None:
        self._totals.append(decode(self._segments, self._words, self._devices, self._w_max))
        self._devices = 0


def _keys(key: StreamKey) -> Callable[[], bytes]:
    """A function that returns a new key of 32 bytes at each call, in the same order for the same device and round."""
    count = 0

    def new_key() -> bytes:
        nonlocal count
        count += 1
        return stream(_LABEL, key.seed, key.round, key.slot, count, words=4).tobytes()

    return new_key
