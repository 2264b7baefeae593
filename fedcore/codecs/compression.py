"""Compression: how a user says that reports become smaller, and the codecs that follow from it for a model.

`rotation,subsample=0.25,bits=4` are steps in the order in which a device takes them. Guide: docs/compression.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from fedcore.codecs import AnyCodec, coded_sizes
from fedcore.codecs.codec import CountSketch, LowRank, Rotation, Subsample
from fedcore.errors import CompressionError
from fedcore.params import ParamSchema
from fedcore.plan import Plan
from fedcore.report import ReportLayout
from fedcore.validation import offered

LEAST_SIZE = 64
"""Segments with fewer values, such as the counts and norms of some algorithms, travel unchanged."""
SKETCH_ROWS = 3
NO_SUMS = {
    "top_k": "every device would choose other places, and only values of the same place add up",
    "error_feedback": "what a device left out would come rounds later, and most devices never come back",
}


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a compression may have.

    number: a description of the number after the step's name; "" if there is none. allowed: whether a number is valid.
    make: the codec of a segment, from its size, the number and the model's schema; None for `bits`, which is no codec.
    """

    number: str
    allowed: Callable[[float], bool]
    make: Callable[[int, float, ParamSchema], AnyCodec] | None = None


def _low_rank(size: int, rank: float, schema: ParamSchema) -> LowRank:
    if size != schema.size:
        raise CompressionError(f"low_rank needs the tensors of a model; a segment has {size} values, not {schema.size}")
    shapes = (tensor.shape if len(tensor.shape) > 1 else (tensor.size, 1) for tensor in schema.tensors)
    return LowRank(int(rank), tuple((shape[0], math.prod(shape[1:])) for shape in shapes))


STEPS = {
    "rotation": Step("", math.isnan, lambda size, _, schema: Rotation.of(size)),
    "subsample": Step(
        "a fraction above 0 and below 1, of the values that travel",
        lambda fraction: 0 < fraction < 1,
        lambda size, fraction, _: Subsample(math.ceil(fraction * size)),
    ),
    "count_sketch": Step(
        "a fraction above 0 and below 1: counters for each value",
        lambda fraction: 0 < fraction < 1,
        lambda size, fraction, _: CountSketch(SKETCH_ROWS, max(1, int(fraction * size / SKETCH_ROWS))),
    ),
    "low_rank": Step("a whole number of 1 or more", lambda rank: rank >= 1 and rank.is_integer(), _low_rank),
    "bits": Step("1, 2, 4 or 8 for each unencrypted value", lambda bits: bits in {1, 2, 4, 8}),
}


@dataclass(frozen=True, slots=True)
class Compression:
    """Steps in their order: each a name of STEPS and its number, NaN for none. Raises CompressionError."""

    steps: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for place, (name, number) in enumerate(self.steps):
            if name in NO_SUMS:
                raise CompressionError(f"{name} does not commute with sums: {NO_SUMS[name]}; take {', '.join(STEPS)}")
            if name not in STEPS:
                raise CompressionError(f"no compression is called {name!r}; {offered(name, STEPS)}")
            step = STEPS[name]
            if not step.allowed(number):
                wanted = f"{name}=NUMBER, {step.number}" if step.number else f"{name} without a number"
                raise CompressionError(f"write {wanted}, not {number:g}")
            if name == "low_rank" and place > 0:
                raise CompressionError("low_rank comes first: the steps before it leave no matrices")
            if name == "bits" and place + 1 < len(self.steps):
                raise CompressionError("bits come last: the other steps are for numbers, which codes are not")

    @classmethod
    def parse(cls, text: str) -> Compression:
        """The compression that a user wrote; an empty text means none. Raises CompressionError."""
        steps = []
        for step in filter(None, (part.strip() for part in text.split(","))):
            name, _, number = step.partition("=")
            try:
                steps.append((name.strip(), float(number) if number else math.nan))
            except ValueError as error:
                raise CompressionError(f"{step}: {number!r} is not a number") from error
        return cls(tuple(steps))

    def __str__(self) -> str:
        """The steps as `parse` reads them."""
        numbers = {name: repr(number).removesuffix(".0") for name, number in self.steps if not math.isnan(number)}
        return ",".join(f"{name}={numbers[name]}" if name in numbers else name for name, _ in self.steps)

    def codecs(self, size: int, schema: ParamSchema) -> tuple[AnyCodec, ...]:
        """The codecs of a mean segment with `size` values, of an algorithm on a model of that schema.

        Raises CompressionError when low-rank factors do not fit the segment.
        """
        chain: tuple[AnyCodec, ...] = ()
        for name, number in self.steps if size >= LEAST_SIZE else ():
            if (make := STEPS[name].make) is not None:
                chain = (*chain, make(coded_sizes(chain, size)[-1], number, schema))
        return chain

    @property
    def bits(self) -> int:
        """Bits of an unencrypted value; 0 for float32."""
        return int(dict(self.steps).get("bits", 0))

    def coded(self, layout: ReportLayout, schema: ParamSchema) -> ReportLayout:
        """The layout with these codecs for its mean segments, but those with ranges. Raises CompressionError."""
        segments = (
            replace(segment, codecs=self.codecs(segment.size, schema)) if segment.normed else segment
            for segment in layout.segments
        )
        return replace(layout, segments=tuple(segments), bits=self.bits)

    def applied(self, plan: Plan) -> Plan:
        """The plan with the layouts of all its trips coded. Raises CompressionError."""
        second = plan.second and replace(plan.second, report=self.coded(plan.second.report, plan.schema))
        return replace(plan, report=self.coded(plan.report, plan.schema), second=second)
