"""Packing: a float vector as words that can be masked and added, and back. Spec: docs/spec/secagg.md §5."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from secagg import masking
from secagg.errors import BadInput, HeadroomError, SumOutOfRange, UnmaskCheckFailed
from secagg.masking import Keystream, Words

WORD_BITS = 64
MOST_IN_BITS, MOST_FIELD_BITS = 20, 32
LEAST_RANGE, MOST_RANGE = 1e-40, 1e40  # what float32 values span
POINT_BITS = 32
POINT, MANTISSA = 2.0**POINT_BITS, 2.0 ** (MOST_IN_BITS + POINT_BITS)
ZERO_TOLERANCE = 1e-6  # of a step, by which 0 may miss one: what float64 makes of a range
SLICE = 1 << 15  # values quantised at a time: their float64 stay in a core's second cache


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A segment's packing: `size` values in [low, high] that share one encoding.

    `in_bits` of precision travel in fields of `field_bits`. A `weighted` segment is multiplied by weight / w_max.
    `norm` is the greatest L2 norm, to which a longer segment is scaled down; 0 is no limit. `noise` is the variance, in
    squared steps, of the noise that a device adds; 0 is none. With noise there is a norm, and 0 is one of the steps.
    """

    size: int
    field_bits: int
    in_bits: int
    low: float
    high: float
    norm: float = 0.0
    weighted: bool = False
    noise: int = 0

    @property
    def per_word(self) -> int:
        """Fields in a word."""
        return WORD_BITS // self.field_bits

    @property
    def words(self) -> int:
        """The number of words of the segment."""
        return -(-self.size // self.per_word)

    @property
    def most(self) -> int:
        """The greatest quantised value."""
        return (1 << self.in_bits) - 1

    @property
    def step(self) -> float:
        """Difference between neighbouring quantised values."""
        return (self.high - self.low) / self.most

    @property
    def zero(self) -> int:
        """The quantised value of 0, if 0 is one of the steps."""
        return round(-self.low / self.step)

    @property
    def most_square(self) -> int:
        """The greatest squared L2 norm of a device's rounded values in a segment with noise, in steps from 0."""
        return masking.most_square(self.norm / self.step, self.size)

    def values_of(self, words: Words) -> Iterator[tuple[Words, slice, np.uint64]]:
        """Slices of the words, each with the range of values that it holds and the bit at which these begin."""
        for plane, begin in enumerate(range(0, self.size, max(self.words, 1))):
            shift = np.uint64(plane * self.field_bits)
            end = min(begin + self.words, self.size)
            for first in range(begin, end, SLICE):
                last = min(first + SLICE, end)
                yield words[first - begin : last - begin], slice(first, last), shift


def check_headroom(segments: Sequence[PackedSegment], n_max: int) -> None:
    """Raise HeadroomError unless every field can hold the sum of n_max values and every range makes sense."""
    for place, segment in enumerate(segments):
        widths = 1 <= segment.in_bits <= MOST_IN_BITS and segment.in_bits <= segment.field_bits <= MOST_FIELD_BITS
        if not (widths and n_max * segment.most < 1 << segment.field_bits):
            raise HeadroomError(
                f"segment {place}: {n_max} values of {segment.in_bits} bits do not fit into fields of "
                f"{segment.field_bits} bits; at most {MOST_IN_BITS} and {MOST_FIELD_BITS} are allowed"
            )
        makes_sense = segment.low <= 0 <= segment.high and LEAST_RANGE <= segment.high - segment.low <= MOST_RANGE
        if not (makes_sense and segment.norm >= 0):
            raise HeadroomError(
                f"segment {place}: [{segment.low}, {segment.high}] with norm {segment.norm} is no range to quantise; "
                "it must hold 0"
            )
        if segment.noise:
            _check_noise(place, segment, n_max)


def _check_noise(place: int, segment: PackedSegment, n_max: int) -> None:
    if not (segment.norm > 0 and abs(segment.zero * segment.step + segment.low) < ZERO_TOLERANCE * segment.step):
        raise HeadroomError(f"segment {place}: noise needs a norm, and a range in which 0 is one of the steps")
    if segment.noise > masking.MOST_VARIANCE:
        raise HeadroomError(
            f"segment {place}: noise of variance {segment.noise} is above {masking.MOST_VARIANCE}: ask for fewer bits"
        )
    if field_bits(segment, n_max) > segment.field_bits:
        raise HeadroomError(
            f"segment {place}: the sum of {n_max} values with noise of variance {segment.noise} needs fields of "
            f"{field_bits(segment, n_max)} bits, not {segment.field_bits}"
        )


def with_noise(segment: PackedSegment, noise_multiplier: float, honest: int) -> PackedSegment:
    """The segment with the noise that reaches `noise_multiplier` in a sum if at least `honest` devices add theirs.

    noise_multiplier: the standard deviation of the sum's noise, over the greatest norm of one device's rounded values.
    """
    if not noise_multiplier:
        return segment
    return replace(segment, noise=masking.noise_share(noise_multiplier, segment.most_square, honest))


def field_bits(segment: PackedSegment, n_max: int) -> int:
    """The narrowest fields that hold the sum of n_max devices and, with probability 1 − 2^-40, its noise."""
    return (n_max * segment.most + 2 * masking.noise_bound(n_max * segment.noise, segment.size)).bit_length()


def word_count(segments: Sequence[PackedSegment]) -> int:
    """W: the weight, all segments, the check word."""
    return 2 + sum(segment.words for segment in segments)


def fresh_key() -> bytes:
    """A new key of 32 bytes, drawn from the system."""
    return secrets.token_bytes(32)


def encode(
    segments: Sequence[PackedSegment],
    vector_D: NDArray[np.float32],
    weight: int,
    w_max: int,
    new_key: Callable[[], bytes] = fresh_key,
) -> Words:
    """The words (W,) of one device, ready to be masked. Raises BadInput.

    new_key: makes the keys of rounding and noise. Only a simulation, which sends no reports, passes its own.
    Trap: values outside [low, high] are clamped, which adds bias; choose norm and range so that it is rare.
    """
    if not 0 <= weight <= w_max:
        raise BadInput(f"the weight must be 0 to {w_max}, not {weight}: cap it, or ask for a session with more room")
    size = sum(segment.size for segment in segments)
    if vector_D.shape != (size,) or vector_D.dtype != np.float32:
        raise BadInput(f"the vector must be float32[{size}], not {vector_D.dtype}{list(vector_D.shape)}")
    words = np.zeros(word_count(segments), np.uint64)
    words[0] = weight
    begin, uniform = 0, Keystream(new_key(), 4 * SLICE)
    for segment, target in _slices(segments, words):
        values = vector_D[begin : begin + segment.size]
        factor = _factor(segment, values, weight / w_max)
        square = _quantise(segment, values, factor, uniform, target)
        if segment.noise:
            while square > segment.most_square:
                target[:] = 0
                square = _quantise(segment, values, factor, uniform, target)
            _add_noise(segment, target, new_key())
        begin += segment.size
    words[-1] = _check_word(words[:-1])
    return words


def _factor(segment: PackedSegment, values: NDArray[np.float32], share: float) -> float:
    """The factor of a segment: clipping to its norm, times `share` if it is weighted. Reports are weighted only here.

    Raises BadInput when the segment holds a value that is not finite.
    """
    # Sums of squared float32 cannot overflow a float64, so the sum is finite exactly when all values are.
    norm = float(np.sqrt(np.einsum("i,i->", values, values, dtype=np.float64)))
    if not isfinite(norm):
        raise BadInput("the vector holds a value that is not finite: the training diverged, and nothing is sent")
    scale = segment.norm / norm if 0 < segment.norm < norm else 1.0
    return scale * share if segment.weighted else scale


def _quantise(
    segment: PackedSegment, values: NDArray[np.float32], factor: float, uniform: Keystream, target: Words
) -> int:
    """Quantise and pack: value v goes into word v mod P, at field ⌊v / P⌋. Gives the squared norm in steps from 0.

    A value becomes a number with 32 fractional bits in the mantissa of a float64 between 2^52 and 2^53, where
    neighbours differ by one. Adding the uniform bits as an integer and cutting them off rounds without bias.
    """
    scale, square = POINT / segment.step, 0
    for part, which, shift in segment.values_of(target):
        x = np.multiply(values[which], factor * scale, dtype=np.float64)
        x += MANTISSA - segment.low * scale
        np.clip(x, MANTISSA, MANTISSA + segment.most * POINT, out=x)
        q = x.view(np.uint64)
        q += uniform.u32(q.size)
        q >>= np.uint64(POINT_BITS)
        q &= np.uint64((1 << MOST_IN_BITS) - 1)
        if segment.noise:
            steps = q.astype(np.int64) - segment.zero
            square += int(np.dot(steps, steps))
        q <<= shift
        np.bitwise_or(part, q, out=part)
    return square


def _add_noise(segment: PackedSegment, target: Words, key: bytes) -> None:
    """Add noise from a separate stream to every value. A negative field borrows from the next one, modulo 2^64."""
    uniform = Keystream(key, 8 * SLICE)
    for part, which, shift in segment.values_of(target):
        noise_values = masking.draw_noise(segment.noise, uniform, which.stop - which.start)
        np.add(part, noise_values.view(np.uint64) << shift, out=part)


@dataclass(frozen=True, slots=True)
class Total:
    """The sum of some devices' reports, in whole numbers. Totals of groups add up to the total of all.

    weight: Σ weight. fields: float64 (D,), Σ of each quantised value, exact since it stays below 2^53.
    """

    segments: tuple[PackedSegment, ...]
    w_max: int
    devices: int
    weight: int
    fields: NDArray[np.float64]

    def __add__(self, other: Total) -> Total:
        """The sum over the devices of both. Raises ValueError when their invitations differ."""
        if (self.segments, self.w_max) != (other.segments, other.w_max):
            raise ValueError("the totals are of different invitations")
        devices, weight = self.devices + other.devices, self.weight + other.weight
        return Total(self.segments, self.w_max, devices, weight, self.fields + other.fields)

    @property
    def sums(self) -> NDArray[np.float64]:
        """Σ of each segment's values, float64 (D,); of a weighted segment it is Σ weight · value."""
        sums_D, begin = self.fields.copy(), 0
        for segment in self.segments:
            values = sums_D[begin : begin + segment.size]
            scale = float(self.w_max) if segment.weighted else 1.0
            values *= segment.step * scale
            values += segment.low * scale * self.devices
            begin += segment.size
        return sums_D


def decode(segments: tuple[PackedSegment, ...], words: Words, devices: int, w_max: int) -> Total:
    """The total in the summed words of `devices` devices.

    Raises UnmaskCheckFailed when the check word is wrong, SumOutOfRange when devices that keep to the rules cannot have
    sent them.
    """
    if _check_word(words[:-1]) != words[-1]:
        raise UnmaskCheckFailed(
            "the sum does not fit its check word: a mask was left on it, as when a device masked for another model or "
            "roster; nothing of it can be used"
        )
    fields = np.empty(sum(segment.size for segment in segments), np.float64)
    begin = 0
    for segment, summed in _slices(segments, words):
        values = fields[begin : begin + segment.size]
        ones = (1 << segment.field_bits) - 1
        # Noise can take a sum as far below 0 as above its greatest value, so half of the field's spare range is each
        # way.
        below = (ones - devices * segment.most) // 2 if segment.noise else 0
        packed = _lifted(segment, summed, below)
        for part, which, shift in segment.values_of(packed):
            values[which] = part >> shift & np.uint64(ones)
        if _has_spare_bits(segment, packed):
            raise SumOutOfRange("bits of the sum are set in which nobody may send a value")
        values -= below
        begin += segment.size
    total = Total(segments, w_max, devices, int(words[0]), fields)
    _check_range(total)
    return total


def _lifted(segment: PackedSegment, packed: Words, by: int) -> Words:
    """The words of a segment with `by` added to each of its values, so that none is below 0."""
    if not by:
        return packed
    lifted = packed.copy()
    for part, _, shift in segment.values_of(lifted):
        np.add(part, np.uint64(by) << shift, out=part)
    return lifted


def _has_spare_bits(segment: PackedSegment, packed: Words) -> bool:
    """Whether a bit is set outside all values."""
    if not segment.size:
        return False
    planes = -(-segment.size // segment.words)
    last = segment.size - (planes - 1) * segment.words
    return any(
        used_bits < WORD_BITS and bool((part >> np.uint64(used_bits)).any())
        for part, used_bits in (
            (packed[:last], planes * segment.field_bits),
            (packed[last:], (planes - 1) * segment.field_bits),
        )
    )


def _check_range(total: Total) -> None:
    """Raise SumOutOfRange unless that many devices can have sent the weights, the values and the norms."""
    if total.weight > total.devices * total.w_max:
        raise SumOutOfRange(
            f"the weights add up to {total.weight}, and {total.devices} devices may have {total.devices * total.w_max}"
        )
    sums_D, begin = total.sums, 0
    for place, segment in enumerate(total.segments):
        end, variance = begin + segment.size, total.devices * segment.noise
        fields, beyond = total.fields[begin:end], masking.noise_bound(variance, segment.size)
        if fields.max(initial=0) > total.devices * segment.most + beyond or fields.min(initial=0) < -beyond:
            raise SumOutOfRange(f"segment {place}: a sum is beyond {total.devices} times the range of a value")
        if segment.weighted and segment.norm:
            beside = masking.rounding_bound(total.devices, segment.size) + masking.norm_bound(variance, segment.size)
            norm, most = float(np.linalg.norm(sums_D[begin:end])), segment.norm * total.weight
            if norm > most + beside * segment.step * total.w_max:
                raise SumOutOfRange(f"segment {place}: the norm is above that of {total.devices} devices that clip")
        begin = end


def _slices(segments: Sequence[PackedSegment], words: Words) -> Iterator[tuple[PackedSegment, Words]]:
    begin = 1
    for segment in segments:
        yield segment, words[begin : begin + segment.words]
        begin += segment.words


def _check_word(words: Words) -> int:
    """Σ (2m + 1) · word m: linear, so that it adds up, with a different factor for each word."""
    odd = np.arange(1, 2 * SLICE, 2, dtype=np.uint64)
    total: int = 0
    for first in range(0, words.size, SLICE):
        part = words[first : first + SLICE]
        total += int(np.dot(part, odd[: part.size])) + 2 * first * int(part.sum())
    return int(total % 2**WORD_BITS)
