"""The numbers of a row and the blocks of a question, and their sensitivity, the L2 norm of one device.

A whole sum whose range has 20 bits at most is one number; a wider one, and one of unknown range, is two words, lest
float32 round it. Numbers of which two words do not hold the sum are added up in parts of a few bits each. Under noise
there are neither words nor parts: noise is far above a rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from export.questions.arithmetic import OPERATORS, holds, is_null
from export.questions.draft import Terms
from export.questions.expressions import Batch, Expression, Groups, derived, literal
from fedcore.errors import QuestionError
from fedcore.questions.question import WORD, Block, Call, Cell, Number, Rows, Value

# The sensitivity of a question: the L2 norm that one device's blocks have at most.
#
# A device has n rows at most (MAX n ROWS PER DEVICE), each in one of G groups.
#
# * Sums. A row adds at most r to one number of a block, r = max |x|, so the absolute numbers of a block add up to n · r
#   at most. Their L2 norm is never above that, and one group with all rows reaches it.
# * With CLIP_PER_DEVICE each number is B at most. So no more than k = min(G, n) numbers differ from 0, the squares are
#   k · B² at most, and with Σ S² ≤ max S · Σ S also B · n · r. The norm is the least of n · r, √k · B and √(B · n · r).
# * Ones: a block of kind "any" has a 1 for every number that a row of the device counts in, and 0 elsewhere: √min(C, n)
#   for C numbers.


def norm_of_sums(groups: int, most_rows: int | None, largest: float, held: float = math.inf) -> float:
    """The most that one device's sums, one for each of G groups, may have as their L2 norm; infinite without bounds.

    largest: the most that a row adds, r. held: what each sum is held to, B.
    """
    rows = math.inf if most_rows is None else most_rows
    together = 0.0 if largest == 0 else rows * largest
    each = min(held, together)
    bounds = [together]
    if math.isfinite(each):
        bounds += [math.sqrt(min(groups, rows)) * each, math.sqrt(each * together)]
    return min(bounds)


def norm_of_ones(cells: int, most_rows: int | None) -> float:
    """The most that one device's ones among so many cells may have as their L2 norm."""
    return math.sqrt(cells if most_rows is None else min(cells, most_rows))


MOST_SINGLE = 2**20
"""The most values of a whole sum that is one number: secure rounds carry 20 bits in steps of 1."""
MOST_WORDS = 2**36
"""The largest whole sum of a device in two words of which float32 rounds neither."""
MOST_COUNTED = 2**24
"""The largest whole number to which float32 has all."""
MOST_MASKED = WORD * (MOST_SINGLE - 2)
"""The most values of a whole sum in two words under masks."""
MOST_ROWS = 2**20
"""The rows of a device, where none are bounded, whose whole sums are exact. One whose words do not hold its sum, which
needs more rows, gives up."""
FARTHEST = 1e26
"""Real numbers of a row are held to this, so that a device's sums are finite."""
NARROWEST = 1e-20
MOST_SHARE = 2.0**40
"""By how much smaller sums of a device than what they are held to count."""
ROUNDING = 2.0**-20
_NO_ROWS = "MAX n ROWS PER DEVICE"
_NO_BOUNDS = "CLIP(x, low, high) with constants for what is summed"


class Bins(NamedTuple):
    """Numbers in W bins, W − 1 edges between them: a number lies in the bin whose lower edge it reaches."""

    number: Expression
    edges: tuple[float, ...]


Made = TypeVar("Made")
Compute = Callable[[Batch, Tensor], Tensor]
"""(batch, ones (B, G) of the rows in each group) -> (B, size)"""
Compare = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Sums:
    """The growing rows and blocks of a question."""

    groups: Groups
    where: Expression | None
    bounds: Terms
    rows: dict[object, Rows] = field(default_factory=dict)
    blocks: dict[object, Block] = field(default_factory=dict)
    _computed: list[Compute] = field(default_factory=list)
    _made: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def voters(self, condition: Expression | None = None, number: Expression | None = None) -> str:
        """The block of the devices that have a row for which a condition is true, in each group, and a number known."""
        return self._ones("devices", self._counted(self._rows_with(condition, number and self._known(number))))

    def towards(self, end: float, condition: Expression | None, number: Expression, *, beyond: bool = False) -> str:
        """The block of the devices whose sum of a number is on that side of 0, further than next to nothing of it.

        beyond: further than the end, by more than a rounding.
        """
        unit = (0.5 - ROUNDING if beyond else MOST_SHARE) / end
        share = self.once(("share", number, unit), lambda: OPERATORS["*"](number, literal(unit)))
        included = self._rows_with(condition, self._known(number))
        rows = self._row("share", (share, included), self.groups.number, _adding(share, included))
        return self._ones("devices", rows)

    def count(self, condition: Expression | None, number: Expression | None = None) -> str:
        """The block of the rows for which a condition is true, and a number is not NULL."""
        rows = self._counted(self._rows_with(condition, number and self._known(number)))
        return self._summed("count", rows, (0, 1), whole=True)

    def total(self, condition: Expression | None, number: Expression, held: tuple[float, float] | None = None) -> Value:
        """The sum of a number over rows for which a condition is true and it is not NULL.

        held: what each device's sum is held to.
        """
        if number.whole and held is None and not self.bounds.private:
            return self.exact(condition, number, [(0, number)])
        reach = number.largest * (self.bounds.most_rows or MOST_ROWS)
        if number.whole and held is not None and number.low < 0 < number.high and reach >= MOST_COUNTED:
            raise QuestionError(
                "CLIP_PER_DEVICE adds up in float32, which loses digits of whole numbers of both signs past 2^24: say "
                "MAX n ROWS PER DEVICE or CLIP(x, low, high), or CAST it AS REAL"
            )
        included = self._rows_with(condition, self._known(number))
        rows = self._row("sum", (number, included), self.groups.number, _adding(number, included))
        ends = _held(number.low), _held(number.high)
        return Cell(self._summed("sum", rows, ends, number.whole and (held is None or _is_single(held)), held))

    def exact(self, condition: Expression | None, of: Expression, numbers: Sequence[tuple[int, Expression]]) -> Value:
        """Σ 2^shift · number of whole numbers, by their shifts, over rows for which a condition is true and `of` is not
        NULL: any range is exact.
        """
        included = self._rows_with(condition, self._known(of))
        pieces = [(shift + more, part) for shift, number in numbers for more, part in self._parts(number)]
        shifts, parts = zip(*pieces, strict=True)
        ends = float(min(part.low for part in parts)), float(max(part.high for part in parts))
        words = len(parts) > 1 or self._in_words(ends)
        compute = _adding_words(parts, included) if words else _adding(parts[0], included)
        rows = self._row("sum", (parts, included), self.groups.number * len(parts), compute, words)
        cell = Cell(self._summed("sum", rows, ends, True))
        return cell if len(parts) == 1 else Call("joined", (Number(shifts), cell))

    def bins(self, condition: Expression | None, bins: Bins, devices: bool, within: Compare = torch.eq) -> str:
        """The block of the rows, or the devices that have rows, in each bin. within: compares a bin with a row's."""
        included = self._rows_with(condition, self._known(bins.number))
        size = self.groups.number * (len(bins.edges) + 1)
        rows = self._row("bins", (bins, included, within), size, _binning(bins, included, within))
        return self._ones("values", rows) if devices else self._summed("bins", rows, (0, 1), whole=True)

    def numbers(self, fields: Mapping[str, Tensor]) -> Tensor:
        """fields: (B, …) by name. The numbers of every row (B, R), in the order of `rows`."""
        batch = Batch(fields)
        ones = self.groups.ones(batch)
        return torch.cat([compute(batch, ones) for compute in self._computed], 1)

    def once(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """What several aggregates need, made once."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]

    def _parts(self, number: Expression) -> list[tuple[int, Expression]]:
        """A whole number in parts whose sums two words hold, by their shifts; one part where they hold its own."""
        most, rows = MOST_MASKED if self.bounds.secure else MOST_WORDS, self.bounds.most_rows or MOST_ROWS
        span = max(number.high, 0) - min(number.low, 0) if self.bounds.secure else number.largest
        parts, rest = list[tuple[int, Expression]](), number
        bits = (most // rows).bit_length() - 1 - self.bounds.secure  # one range holds negative and other parts
        while span * rows >= most and rest.largest >= 2**bits:
            low, rest = self.once(("parted", rest, bits), functools.partial(parted, rest, bits))
            parts.append((bits * len(parts), low))
        return [*parts, (bits * len(parts), rest)]

    def _rows_with(self, *conditions: Expression | None) -> Expression | None:
        """WHERE and other conditions together."""
        given = [one for one in (self.where, *conditions) if one is not None and not (one.constant and one.value)]
        if not given:
            return None
        return self.once(("and", *given), lambda: OPERATORS["and"](*given))

    def _known(self, number: Expression) -> Expression | None:
        """The condition that a number is not NULL; None if it never is."""
        if not number.nullable:
            return None
        return self.once(("known", number), lambda: OPERATORS["not"](is_null(number)))

    def _counted(self, included: Expression | None) -> Rows:
        return self._row("rows", (included,), self.groups.number, lambda batch, ones: _of(included, batch, ones))

    def _row(self, name: str, key: object, size: int, compute: Compute, words: bool = False) -> Rows:
        found = self.rows.get((name, key))
        if found is None:
            found = self.rows[name, key] = Rows(f"{name}_{len(self.rows)}", size, words)
            self._computed.append(compute)
        return found

    def _block(self, key: object, block: Callable[[str], Block]) -> str:
        if key not in self.blocks:
            self.blocks[key] = block(f"{key[0]}_{len(self.blocks)}")  # type: ignore[index]
        return self.blocks[key].name

    def _ones(self, name: str, rows: Rows) -> str:
        norm = norm_of_ones(rows.size, self.bounds.most_rows)
        return self._block((name, rows.name), lambda own: Block(own, rows.name, "any", 0, 1, norm=norm))

    def _summed(
        self, name: str, rows: Rows, ends: tuple[float, float], whole: bool, held: tuple[float, float] | None = None
    ) -> str:
        """A block of sums of numbers that lie between two ends. Raises QuestionError where a bound is missing."""
        largest = max(map(abs, ends))
        low, high = self._range(ends) if held is None else held
        most = math.inf if held is None else max(map(abs, held))
        norm = norm_of_sums(rows.size, self.bounds.most_rows, largest, most)
        if math.isinf(norm if self.bounds.private else high - low if self.bounds.secure else 0):
            missing = _NO_ROWS if self.bounds.most_rows is None else _NO_BOUNDS
            why = "noise is as large as what one device may add" if self.bounds.private else "masked sums have a range"
            raise QuestionError(f"this needs {missing}: {why}")

        def block(own: str) -> Block:
            unit = norm if 0 < norm < math.inf else 1.0
            return Block(own, rows.name, "sum", _known(low), _known(high), whole, unit)

        return self._block((name, rows.name, held), block)

    def _range(self, ends: tuple[float, float]) -> tuple[float, float]:
        """Where a device's sum lies, of numbers that lie between two ends. What is always 0 has a range too."""
        rows = math.inf if self.bounds.most_rows is None else self.bounds.most_rows
        low, high = ends[0] * rows if ends[0] < 0 else 0, ends[1] * rows if ends[1] > 0 else 0
        return low, high if high - low > NARROWEST else low + 1

    def _in_words(self, ends: tuple[float, float]) -> bool:
        """Whether the sum of such whole numbers takes two words."""
        low, high = self._range(ends)
        return max(map(abs, ends)) > 1 and high - low >= MOST_SINGLE


def parted(number: Expression, bits: int) -> tuple[Expression, Expression]:
    """The lowest bits of a whole number, and the others: number = low + 2^bits · high, with low from 0."""
    base = 2**bits
    lowest, highest = int(number.low) // base, int(number.high) // base
    lift = max(-lowest, 0)  # as negative numbers divide otherwise elsewhere

    def others(values: Tensor) -> Tensor:
        high: Tensor = torch.floor_divide(values + lift * base, base) - lift
        return high

    high = derived("whole", (lowest, highest), others, number)
    return derived("whole", (0, base - 1), lambda values: values - others(values) * base, number), high


def _is_single(held: tuple[float, float]) -> bool:
    """Whether a sum that is held to two ends is a whole number that float32 and 20 bits hold."""
    return all(isinstance(end, int) for end in held) and held[1] - held[0] < MOST_SINGLE


def _held(end: float) -> float:
    """A bound of a number of a row, which is held to FARTHEST."""
    return end if math.isinf(end) else max(min(end, FARTHEST), -FARTHEST)


def _known(end: float) -> float | None:
    return None if math.isinf(end) else end


def _of(included: Expression | None, batch: Batch, ones: Tensor) -> Tensor:
    """The ones (B, …) of rows for which a condition is true."""
    if included is None:
        return ones
    chosen = batch.rows(holds(included, batch)).to(torch.float32)
    return ones * chosen.unsqueeze(-1)


def _adding(number: Expression, included: Expression | None) -> Compute:
    def compute(batch: Batch, ones: Tensor) -> Tensor:
        values = batch.rows(batch.of(number).values)
        values = (values if number.largest <= FARTHEST else values.clamp(-FARTHEST, FARTHEST)).to(torch.float32)
        return _of(included, batch, ones) * values.unsqueeze(-1)

    return compute


def _adding_words(parts: Sequence[Expression], included: Expression | None) -> Compute:
    """The low words of all parts in each group, then the high words."""

    def compute(batch: Batch, ones: Tensor) -> Tensor:
        values = torch.stack([batch.rows(batch.of(part).values).to(torch.int64) for part in parts], 1)
        chosen = _of(included, batch, ones).unsqueeze(-1)
        return torch.cat([(chosen * word.to(torch.float32).unsqueeze(1)).flatten(1) for word in _words(values)], 1)

    return compute


def _words(values: Tensor) -> Sequence[Tensor]:
    """The low and the high word of whole numbers. They are shifted up, as negative ones divide otherwise elsewhere."""
    high = torch.floor_divide(values + MOST_WORDS, WORD) - MOST_WORDS // WORD
    return values - high * WORD, high


def _binning(bins: Bins, included: Expression | None, within: Compare) -> Compute:
    edges = torch.tensor(bins.edges, dtype=torch.float64)
    places = torch.arange(len(bins.edges) + 1, dtype=torch.float32)

    def compute(batch: Batch, ones: Tensor) -> Tensor:
        values = batch.rows(batch.of(bins.number).values).to(torch.float64)
        place = (values.unsqueeze(-1) >= batch.constant(edges)).to(torch.float32).sum(-1, keepdim=True)
        found = within(batch.constant(places), place).to(torch.float32)
        return (_of(included, batch, ones).unsqueeze(-1) * found.unsqueeze(-2)).flatten(1)

    return compute
