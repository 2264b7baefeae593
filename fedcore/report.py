"""A device's report: one float32 vector of named segments. Reports are only ever summed.

Spec: docs/spec/plan.md §5. A "mean" segment is multiplied by the device's weight before it leaves the device, and the
coordinator divides the sum by the summed weights; a "sum" segment (a metric) is added as it is.

A device keeps its report unweighted until it sends it: the values (V,), which are all segments but the weight, and the
weight beside them. The report is weighted once: by `ReportLayout.weigh` before an unencrypted upload, by
`secagg.packing` when it is masked. L = V + 1.

Mean segments may have codecs (§5.1). Then all of these values are the coded ones, `ReportLayout.decode` undoes the
codecs of a sum, and V and L count coded values. A segment may have a range instead (§5.3), to which a device clamps it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from numpy.typing import NDArray

from fedcore import codecs
from fedcore.codecs import CountSketch, RoundKey
from fedcore.errors import ReportError
from fedcore.params import Float32, Size, VectorSpec
from fedcore.schedule import Range, Weighting

Vector = TypeVar("Vector", Float32, NDArray[np.float64])
WEIGHT = "weight"
"""The segment that holds the device's weight."""
MOST_SEGMENTS = 64
"""Of a report: a coordinator goes over all of them for each report that comes. Export makes a few."""
ROUNDING = 2.0**-23
"""Twice the relative error that rounding to float32 may add to a norm."""
_METRICS = ".metrics"


def weight_of(weighting: Weighting, examples: int) -> float:
    """The weight of a device with `examples` examples: their number under "examples", 1 under "uniform"."""
    return float(examples) if weighting == "examples" else 1.0


def metrics_segment(pass_name: str) -> str:
    """The name of the segment that holds a pass's metric sums."""
    return f"{pass_name}{_METRICS}"


def clip_to(values_V: Float32, clip: float) -> Float32:
    """Finite values, scaled down in place to an l2 norm of at most `clip`, computed in float64."""
    norm = math.sqrt(float(np.einsum("i,i->", values_V, values_V, dtype=np.float64)))
    if norm > clip:
        factor = clip / norm * (1 - ROUNDING)
        np.multiply(values_V, factor, out=values_V, dtype=np.float64, casting="same_kind")
    return values_V


def all_finite(vector: Float32) -> bool:
    """Whether all values of (n,) are finite."""
    # If any value is not finite, neither is the sum, which needs no memory. Finite values may overflow it, too.
    return bool(np.isfinite(np.einsum("i->", vector)) or np.isfinite(vector).all())


class Segment(msgspec.Struct, frozen=True):
    """One named range of the report: `size` values, as a graph or a pass makes them.

    labels: the names of the values of a metrics segment. codecs: the codecs that encode a mean segment. range: the
    bounds of a segment without codecs, and its precision in a secure round, where they are not those of the task.
    """

    name: str
    size: Size
    reduction: Literal["mean", "sum"]
    labels: tuple[str, ...] = ()
    codecs: tuple[codecs.AnyCodec, ...] = ()
    range: Range | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.codecs and self.ranged:
            raise ReportError(f"segment {self.name!r} has a range, to which what codecs make of it does not keep")
        if self.codecs and self.reduction != "mean":
            raise ReportError(f"segment {self.name!r} is a sum of metrics, which no codec may change")
        if len(self.codecs) > codecs.MOST_CODECS:
            raise ReportError(f"segment {self.name!r} has {len(self.codecs)} codecs; there may be {codecs.MOST_CODECS}")
        if max(codecs.coded_sizes(self.codecs, self.size)) > self.size:
            raise ReportError(f"the codecs of segment {self.name!r} make more values of its {self.size}")

    @property
    def ranged(self) -> bool:
        """Whether its values have a range of their own."""
        return self.range is not UNSET

    @property
    def normed(self) -> bool:
        """Whether its L2 norm is bounded, by the task: that of a mean segment without a range."""
        return self.reduction == "mean" and self.range is UNSET

    @property
    def coded_size(self) -> int:
        """Values that travel."""
        return codecs.coded_sizes(self.codecs, self.size)[-1] if self.codecs else self.size


class ReportLayout(msgspec.Struct, frozen=True):
    """The segments of a report, in order. Exactly one of them is the device's weight.

    bounded: whether the mean segments together are clipped to a norm. Then the only other segment is the weight, which
    is 1, none has a range, and a device sends zeros instead of values that are not finite.
    bits: per value of a mean segment without a range in an unencrypted upload; 0 for float32.
    """

    segments: tuple[Segment, ...]
    weighting: Weighting
    bounded: bool = False
    bits: Literal[0, 1, 2, 4, 8] = 0

    def __post_init__(self) -> None:
        if len(self.segments) > MOST_SEGMENTS:
            raise ReportError(f"a report has {len(self.segments)} segments; there may be {MOST_SEGMENTS}")
        names = [segment.name for segment in self.segments]
        if len(set(names)) != len(names) or names.count(WEIGHT) != 1:
            raise ReportError(f"segments must be distinct and hold one {WEIGHT!r}: {names}")
        weight = self.segments[names.index(WEIGHT)]
        if weight.size != 1 or weight.reduction != "sum":
            raise ReportError(f"segment {WEIGHT!r} must be one value that is summed, not {weight}")
        self._check_ranges()
        sums = [segment.name for segment in self.segments if segment.reduction == "sum"]
        if self.bounded and (self.weighting != "uniform" or sums != [WEIGHT]):
            raise ReportError(f"a bounded report weighs 1 and has no sums, not {self.weighting!r} weights and {sums}")
        sketched = any(isinstance(codec, CountSketch) for segment in self.segments for codec in segment.codecs)
        if self.bounded and (self.bits or sketched):
            raise ReportError(
                "quantising and sketching may make a norm greater, and a bounded report is clipped to one"
            )

    def _check_ranges(self) -> None:
        for segment in self.segments:
            if segment.ranged and segment.name == WEIGHT:
                raise ReportError(f"the weight of a device has no range; segment {WEIGHT!r} must be without")
            if segment.ranged and self.bounded:
                raise ReportError(f"a bounded report is clipped as one vector; segment {segment.name!r} has a range")
            if segment.ranged and segment.reduction == "mean" and self.weighting != "uniform":
                raise ReportError(
                    f"segment {segment.name!r} has a range, and is multiplied by a weight, which takes it out of that: "
                    "mean segments may have one under uniform weighting only"
                )

    @property
    def size(self) -> int:
        """L, the length of the report vector."""
        return sum(segment.coded_size for segment in self.segments)

    @property
    def has_codecs(self) -> bool:
        """Whether segments have codecs. Then only reports that are encoded with the same key add up."""
        return any(segment.codecs for segment in self.segments)

    @property
    def decoded(self) -> ReportLayout:
        """The layout of what `decode` gives: the same segments without codecs, in float32."""
        return replace(self, segments=tuple(replace(segment, codecs=()) for segment in self.segments), bits=0)

    @property
    def wire(self) -> tuple[VectorSpec, ...]:
        """The vector in the body of an upload."""
        return (VectorSpec("report", self.size),)

    @property
    def unweighted(self) -> tuple[Segment, ...]:
        """The segments of the values (V,), which are kept until the report is weighted: all but the weight."""
        return tuple(segment for segment in self.segments if segment.name != WEIGHT)

    @property
    def means(self) -> tuple[VectorSpec, ...]:
        """The outputs of the report graph."""
        return tuple(VectorSpec(segment.name, segment.size) for segment in self.segments if segment.reduction == "mean")

    def encode(self, means: Mapping[str, Float32], key: RoundKey) -> dict[str, Float32]:
        """The outputs of the report graph, by name, encoded by the codecs."""
        return {
            segment.name: codecs.encode(segment.codecs, means[segment.name], key, index)
            for index, segment in enumerate(self.segments)
            if segment.reduction == "mean"
        }

    def decode(self, summed_L: Vector, key: RoundKey) -> Vector:
        """Undo the codecs of a sum of reports: a vector of the layout `decoded`. Raises ReportError for a wrong length.

        Trap: all reports in the sum must be of the round that `key` names.
        """
        self._check_size(summed_L)
        if not self.has_codecs:
            return summed_L
        return np.concatenate(
            [
                codecs.decode(segment.codecs, summed_L[where], segment.size, key, index)
                for index, (segment, where) in enumerate(self.slices())
            ]
        )

    def weight(self, examples: int) -> float:
        """The weight of a device with `examples` examples."""
        return weight_of(self.weighting, examples)

    def concatenate(self, parts: Mapping[str, Float32], weight: float, clip: float = math.inf) -> Float32:
        """The unweighted values (V,) of a report, from the output of `encode` and metric sums, each within its
        segment's range. If the report is bounded and a value is NaN or ∞, all are zeros.

        clip: the bound that devices received, if the report is bounded. The graph clips in float32, where the norm of a
        million values may be some thousandths off, so the whole report is clipped again here.
        Raises ReportError when a segment is missing, of another size, or not finite once it has the weight.
        """
        values_V, start = np.empty(self.size - 1, np.float32), 0
        for segment in self.unweighted:
            part = parts.get(segment.name)
            size = segment.coded_size
            if part is None or part.shape != (size,):
                raise ReportError(f"segment {segment.name!r} must be float32[{size}]")
            largest = np.abs(part).max(initial=np.float32(0)) * self._factor(segment, weight)
            if not np.isfinite(largest) and self.bounded:
                return np.zeros_like(values_V)
            if not np.isfinite(largest):
                raise ReportError(f"segment {segment.name!r} holds a non-finite value")
            within = segment.range
            values_V[start : start + size] = part if within is UNSET else np.clip(part, within.low, within.high)
            start += size
        return clip_to(values_V, clip) if self.bounded else values_V

    def weigh(self, values_V: Float32, weight: float) -> Float32:
        """The report (L,) to upload: mean segments of `values_V` times the weight, and the weight itself."""
        report_L, start = np.empty(self.size, np.float32), 0
        for segment, where in self.slices():
            if segment.name == WEIGHT:
                report_L[where] = weight
                continue
            part = values_V[start : start + segment.coded_size]
            np.multiply(part, self._factor(segment, weight), out=report_L[where])
            start += part.size
        return report_L

    def check(self, vector: Float32, *, finite: bool = False) -> None:
        """Raise ReportError unless `vector` could be one device's report: its length, finite, a weight above 0.

        Under "uniform" the weight is 1; under "examples" the device's own count is trusted. finite: whether all values
        are already known to be finite.
        """
        self._check_size(vector)
        if not finite and not all_finite(vector):
            raise ReportError("the report holds a number that is not finite")
        weight = float(next(vector[where][0] for segment, where in self.slices() if segment.name == WEIGHT))
        allowed = weight == 1 if self.weighting == "uniform" else weight > 0
        if not allowed:
            raise ReportError(f"a device cannot weigh {weight} under {self.weighting!r} weighting")

    def split(self, summed: Any) -> dict[str, Any]:
        """Named views of a summed (L,) vector (NumPy or torch), with mean segments divided by the summed weight.

        Trap: with codecs these are coded values; use `decode` and the layout `decoded`. Raises ReportError when the
        length is wrong or the summed weight is not positive.
        """
        self._check_size(summed)
        parts = {segment.name: (segment, summed[where]) for segment, where in self.slices()}
        weight = parts[WEIGHT][1]
        if not float(weight[0]) > 0:
            raise ReportError(f"the summed weight is {float(weight[0])}, expected a positive number")
        return {
            name: value / weight if segment.reduction == "mean" else value for name, (segment, value) in parts.items()
        }

    def metrics(self, parts: Mapping[str, NDArray[np.generic]]) -> dict[str, float]:
        """Per-example means of every metrics segment of `split`'s answer, as `pass.metric`."""
        means: dict[str, float] = {}
        for segment in self.segments:
            if segment.labels:
                examples = float(parts[segment.name][0])
                for label, value in zip(segment.labels[1:], parts[segment.name][1:], strict=True):
                    means[f"{segment.name.removesuffix(_METRICS)}.{label}"] = float(value) / max(examples, 1.0)
        return means

    @staticmethod
    def _factor(segment: Segment, weight: float) -> np.float32:
        """The factor by which a device multiplies a segment."""
        return np.float32(weight if segment.reduction == "mean" else 1)

    def slices(self) -> list[tuple[Segment, slice]]:
        """Every segment with its range in the report vector."""
        start, ranges = 0, []
        for segment in self.segments:
            size = segment.coded_size
            ranges.append((segment, slice(start, start + size)))
            start += size
        return ranges

    def _check_size(self, vector: Any) -> None:
        if vector.shape != (self.size,):
            raise ReportError(f"a report has {self.size} values, not {list(vector.shape)}")


LOSSES = "losses"
_OCTAVES = range(-8, 24)
LEVELS = 2 * len(_OCTAVES)
"""Losses that are looked for, from 2^-8 to 1.5 · 2^23. Spec: docs/spec/plan.md §5.5.

A false report can move a mean of losses anywhere; here each device counts once, and moves each count by 1.
"""
LOSS_COUNTS = Segment(LOSSES, 2 * LEVELS, "sum", range=Range(0, 1, 1))
"""The segment: the counts before training, and those of training."""


def levels() -> Float32:
    """The losses (LEVELS,) that are looked for, ascending: 2^k and 1.5 · 2^k, which are exact."""
    return np.array([factor * 2.0**octave for octave in _OCTAVES for factor in (1, 1.5)], np.float32)


def count_losses(first_M: Float32, training_M: Float32) -> Float32:
    """The values (2 LEVELS,) of the segment: 1 for every level that a mean loss reaches, and 0.

    first_M: the metric sums of the first step of the first pass, which starts at the received model. training_M: those
    of the whole last pass. The first of each is the number of examples, the second the loss.
    """
    with np.errstate(all="ignore"):  # sums that are not finite reach no level, and the report is refused for them
        reached = [sums_M[1] / sums_M[0] >= levels() for sums_M in (first_M, training_M)]
    return np.concatenate(reached).astype(np.float32)
