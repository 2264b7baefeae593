"""A tree of prefixes as numbers: how values are cut into digits, and where candidates and found values stand.

A value is `letters` letters of `bits` bits, or one whole number of so many. Its bits, the first ones first, are cut
into digits. The first digit is known of every candidate from the start: there is one for each of its values. A round
extends candidates by one digit more, of `step_bits` bits at most.

A candidate c and how a value goes on make a cell, c · (S + 1) + e, counted from 0: e < S is the next digit, and e = S
says that all further digits are 0, so that short words and round numbers end early.

It needs no NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

UNKNOWN, DEAD = -1, -2
"""In the place of a digit: not known yet; and, in that of the first one, no candidate."""
PREFIXES, WORDS, DEVICES, OUT_OF, ANSWERED = "prefixes", "words", "devices", "out_of", "answered"
"""The tensors of the model: digits of candidates, and of found values with their counts, each in columns."""


class PrefixTree(NamedTuple):
    """letters: of a value; 0 for a whole number. bits: of a letter, or of the number. candidates: prefixes, C.

    step_bits: of a digit, b, so that S = 2^b.
    """

    letters: int
    bits: int
    candidates: int
    step_bits: int

    @property
    def value_bits(self) -> int:
        """The bits of a value."""
        return self.bits * max(self.letters, 1)

    @property
    def first_bits(self) -> int:
        """The bits that are known from the start: there is a candidate for each of their values."""
        return min(self.candidates.bit_length() - 1, self.value_bits - 1)

    @property
    def widths(self) -> tuple[int, ...]:
        """The bits of every digit, the first one first."""
        rest = self.value_bits - self.first_bits
        steps = [min(self.step_bits, rest - done) for done in range(0, rest, self.step_bits)]
        return (*([self.first_bits] if self.first_bits else []), *steps)

    @property
    def rounds(self) -> int:
        """The rounds after which every value is whole."""
        return -(-(self.value_bits - self.first_bits) // self.step_bits)

    @property
    def digits(self) -> int:
        """N, the digits of a value."""
        return len(self.widths)

    @property
    def cell_count(self) -> int:
        """C (S + 1)."""
        return self.candidates * ((1 << self.step_bits) + 1)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of the model, in order. answered: the devices of the last round."""
        columns = self.digits, self.candidates
        return {
            ANSWERED: (1,),
            PREFIXES: columns,
            WORDS: columns,
            DEVICES: (self.candidates,),
            OUT_OF: (self.candidates,),
        }

    @property
    def places(self) -> Mapping[str, slice]:
        """Where each tensor is in the flat vector."""
        found, start = dict[str, slice](), 0
        for name, shape in self.shapes.items():
            found[name] = slice(start, start := start + math.prod(shape))
        return found

    def columns(self, name: str) -> tuple[slice, ...]:
        """Where each digit of all candidates, or of all found values, is in the flat vector."""
        start, count = self.places[name].start, self.candidates
        return tuple(slice(start + digit * count, start + (digit + 1) * count) for digit in range(self.digits))

    def value(self, digits: Sequence[int]) -> bytes | int:
        """The value of all its digits: the bytes of a word without the zeros behind it, or a whole number."""
        whole = 0
        for digit, width in zip(digits, self.widths, strict=True):
            whole = (whole << width) + digit
        if not self.letters:
            return whole
        shifts = range(self.bits * (self.letters - 1), -1, -self.bits)
        return bytes(whole >> shift & (1 << self.bits) - 1 for shift in shifts).rstrip(b"\0")
