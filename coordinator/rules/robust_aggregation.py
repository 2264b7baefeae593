"""Robust aggregation: estimates of the mean that a few false reports cannot move far. It keeps reports one by one.

Legend: K reports, L values of a report, B values of a block. Spec: docs/spec/rounds.md §8.

Trimmed mean and median: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning", ICML 2018. Krum:
Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries", NeurIPS 2017. All count every report
alike, whatever its weight, and all are biased where devices' examples differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.aggregation import ReportSum
from coordinator.rules.task_settings import ClearReports
from fedcore.params import Float32
from fedcore.report import WEIGHT, ReportLayout

Float64 = NDArray[np.float64]
_BLOCK = 1 << 16
"""Values of each report that are looked at together, so that little memory is needed beside the reports."""


class KeptReports:
    """The reports of a round, one by one. `total` is what `ReportSum` would have if each were the estimate.

    It is computed once: a round that cannot be committed yet, as the database is locked, is tried again and again.
    """

    def __init__(self, layout: ReportLayout, clear: ClearReports) -> None:
        self._layout = layout
        self._clear = clear
        self._reports: list[Float32] = []
        self._total: Float64 | None = None

    def add(self, *reports_KL: NDArray[np.floating[Any]]) -> None:
        """Keep copies of reports: their memory is used again as soon as they are answered."""
        self._reports += [np.array(report, np.float32) for report in reports_KL]
        self._total = None

    def total(self) -> Float64:
        """Float64 (L,): mean segments the estimate times the summed weight, but those with ranges; all others as they
        are.
        """
        if self._total is None:
            self._total = self._computed()
        return self._total

    def _computed(self) -> Float64:
        slices = self._layout.slices()
        weight_at = next(where.start for segment, where in slices if segment.name == WEIGHT)
        weights_K = np.array([float(report[weight_at]) for report in self._reports])
        total_L = np.zeros(self._layout.size)
        chosen = self._nearest(weights_K) if self._clear.estimator == "krum" else None
        for block in _blocks(self._layout, normed=False):
            total_L[block] = self._block(block).sum(axis=0)
        for block in _blocks(self._layout, normed=True):
            means_KB = self._block(block) / weights_K[:, None]
            total_L[block] = weights_K.sum() * (means_KB[chosen] if chosen is not None else self._estimate(means_KB))
        return total_L

    def _estimate(self, means_KB: Float64) -> Float64:
        if self._clear.estimator == "median":
            return np.asarray(np.median(means_KB, axis=0))
        cut = self._clear.tolerate
        return np.asarray(np.sort(means_KB, axis=0)[cut : len(means_KB) - cut].mean(axis=0))

    def _nearest(self, weights_K: Float64) -> int:
        """Krum: the report with the least sum of squared distances to the K - f - 2 that are nearest to it."""
        count = len(weights_K)
        products_KK = np.zeros((count, count))
        for block in _blocks(self._layout, normed=True):
            means_KB = self._block(block) / weights_K[:, None]
            products_KK += means_KB @ means_KB.T
        squares_K = products_KK.diagonal()
        distances_KK = np.maximum(squares_K[:, None] + squares_K - 2 * products_KK, 0)
        nearest = np.sort(distances_KK, axis=1)[:, 1 : count - self._clear.tolerate - 1]
        return int(nearest.sum(axis=1).argmin())

    def _block(self, block: slice) -> Float64:
        return np.stack([report[block] for report in self._reports]).astype(np.float64)


def collector(layout: ReportLayout, clear: ClearReports) -> ReportSum | KeptReports:
    """The container for a round's reports: their sum, unless an estimator needs them one by one."""
    return ReportSum(layout.size) if clear.estimator == "mean" else KeptReports(layout, clear)


def _blocks(layout: ReportLayout, *, normed: bool) -> Iterator[slice]:
    """The segments that are held to a norm, or the others, in pieces."""
    for segment, where in layout.slices():
        if segment.normed is normed:
            for begin in range(where.start, where.stop, _BLOCK):
                yield slice(begin, min(begin + _BLOCK, where.stop))
