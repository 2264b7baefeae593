"""A device's whole contribution: one float32 vector, the concatenation of named segments, that is only ever summed.

Spec: docs/spec/plan.md §5. A "mean" segment is multiplied by the device's weight before it leaves the device, and the
coordinator divides the sum by the summed weights; a "sum" segment (a metric) is added as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.errors import ReportError
from fedcore.params import Float32, Size, VectorSpec

Weighting = Literal["examples", "uniform"]
WEIGHT = "weight"


def all_finite(vector: Float32) -> bool:
    """Whether all values of (n,) are finite."""
    # Their sum is not finite if any is not, and takes no memory; finite values may overflow it, too.
    return bool(np.isfinite(np.einsum("i->", vector)) or np.isfinite(vector).all())


class Segment(msgspec.Struct, frozen=True):
    """One named range of the report. `labels` names the values of a metrics segment."""

    name: str
    size: Size
    reduction: Literal["mean", "sum"]
    labels: tuple[str, ...] = ()


class ReportLayout(msgspec.Struct, frozen=True):
    """The segments of a report, in order. Exactly one is the device's weight."""

    segments: tuple[Segment, ...]
    weighting: Weighting

    def __post_init__(self) -> None:
        names = [segment.name for segment in self.segments]
        if len(set(names)) != len(names) or names.count(WEIGHT) != 1:
            raise ReportError(f"segments must be distinct and hold one {WEIGHT!r}: {names}")
        weight = self.segments[names.index(WEIGHT)]
        if weight.size != 1 or weight.reduction != "sum":
            raise ReportError(f"segment {WEIGHT!r} must be one value that is summed, not {weight}")

    @property
    def size(self) -> int:
        """Length of the report vector."""
        return sum(segment.size for segment in self.segments)

    @property
    def wire(self) -> tuple[VectorSpec, ...]:
        """What the body of an upload holds."""
        return (VectorSpec("report", self.size),)

    def weight(self, examples: int) -> float:
        """w of a device with that many examples: n under "examples", 1 under "uniform"."""
        return float(examples) if self.weighting == "examples" else 1.0

    def concatenate(self, values: Mapping[str, Float32], weight: float) -> Float32:
        """The report vector: mean segments times `weight`, then the weight itself and the sums.

        Raises ReportError when a segment is missing, of another size, or not finite.
        """
        vector = np.empty(self.size, np.float32)
        for segment, where in self._slices():
            if segment.name == WEIGHT:
                vector[where] = weight
                continue
            value = values.get(segment.name)
            if value is None or value.shape != (segment.size,):
                raise ReportError(f"segment {segment.name!r} must be float32[{segment.size}]")
            np.multiply(value, np.float32(weight if segment.reduction == "mean" else 1), out=vector[where])
            if not np.isfinite(vector[where]).all():
                raise ReportError(f"segment {segment.name!r} holds a non-finite value")
        return vector

    def check(self, vector: Float32, *, finite: bool = False) -> None:
        """Raise ReportError unless `vector` could be one device's report: its length, finite, a weight above 0.

        Under "uniform" the weight is 1; under "examples" a device's own count is taken on trust. finite: whether it is
        known that all values are.
        """
        if vector.shape != (self.size,):
            raise ReportError(f"a report has {self.size} values, not {list(vector.shape)}")
        if not finite and not all_finite(vector):
            raise ReportError("the report holds a number that is not finite")
        weight = float(next(vector[where][0] for segment, where in self._slices() if segment.name == WEIGHT))
        allowed = weight == 1 if self.weighting == "uniform" else weight > 0
        if not allowed:
            raise ReportError(f"a device cannot weigh {weight} under {self.weighting!r} weighting")

    def split(self, summed: Any) -> dict[str, Any]:
        """Named views of a summed (L,) vector (NumPy or torch), with mean segments divided by the summed weight.

        Raises ReportError when the length is wrong or the summed weight is not positive.
        """
        if summed.shape != (self.size,):
            raise ReportError(f"a report has {self.size} values, not {list(summed.shape)}")
        parts = {segment.name: (segment, summed[where]) for segment, where in self._slices()}
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
                    means[f"{segment.name.removesuffix('.metrics')}.{label}"] = float(value) / max(examples, 1.0)
        return means

    def _slices(self) -> list[tuple[Segment, slice]]:
        start, ranges = 0, []
        for segment in self.segments:
            ranges.append((segment, slice(start, start + segment.size)))
            start += segment.size
        return ranges
