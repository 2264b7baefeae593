"""A question to devices as data, with how a table is read from the sum; and the tree of prefixes of heavy hitters.

An example of a device is a row. A question has R row numbers: of every row, the graph computes R numbers c, and a
device adds them up. From its sums S (R,) it makes V numbers b, the blocks, which it sends, and from the sum of these
over devices the table is read (`fedcore.questions.answer`).

    S = Σ c                                       over the rows of a device, of which there are `most_rows` at most
    b = S held to low … high                      a block of kind "sum"
    b = 1 if S ≥ 1 else 0                         of kind "any": the devices that have such a row
    b = 1 in the bin that S lies in, else 0       of kind "bins": a histogram over devices of one S

Grouped numbers have one number for every group, in the order of the keys' values, the last key fastest, or several for
every group. A block of fewer numbers than there are groups is of all groups at once. A whole number of unknown size
travels in two words of base 4096 (`WORD`), lest float32 round it.

It needs no NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import force_setattr

from fedcore.errors import QuestionError
from fedcore.questions.functions import FUNCTIONS
from fedcore.validation import decoded, decoder, offered

# A value is `letters` letters of `bits` bits, or one whole number of so many. Its bits, the first ones first, are cut
# into digits. The first digit is known of every candidate from the start: there is one for each of its values. A round
# extends candidates by one digit more, of `step_bits` bits at most.
#
# A candidate c and how a value goes on make a cell, c · (S + 1) + e, counted from 0: e < S is the next digit, and e = S
# says that all further digits are 0, so that short words and round numbers end early.

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


WORD = 4096
"""The base of the words of large whole numbers: 4,096 low words add up exactly in float32."""
MOST_CELLS = 8192
"""The most row numbers of a question, and the most numbers of a report."""
MOST_BLOCKS = 48
DEEPEST = 50
"""The most functions inside each other in a column."""
LONGEST_QUESTION = 4_000
Literals: TypeAlias = bool | int | float | str | None


class Rows(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers of a row, `size` of them, which a device adds up. words: whole numbers, each as a low and a high word."""

    name: str
    size: int = 1
    words: bool = False


class Block(msgspec.Struct, frozen=True, omit_defaults=True):
    """Numbers that a device sends, made of the sums of `of`, which names Rows.

    low, high: the bounds of each number on one device; None where there are none. whole: whether they are whole
    numbers. norm: the most that one device's numbers may have as their L2 norm; under noise they are divided by it.
    edges: of the bins of a block of kind "bins", B − 1 inner ones in ascending order: a number lies in the bin whose
    lower edge it reaches, below the first edge in the first one.
    """

    name: str
    of: str
    kind: Literal["sum", "any", "bins"] = "sum"
    low: float | None = None
    high: float | None = None
    whole: bool = True
    norm: float = 1.0
    edges: tuple[float, ...] = ()


class Key(msgspec.Struct, frozen=True):
    """A key of groups: its column's name, and its value in every group."""

    name: str
    values: tuple[Literals, ...]


class Number(msgspec.Struct, frozen=True, tag="number"):
    """A constant, or several."""

    value: Literals | tuple[Literals, ...]


class Cell(msgspec.Struct, frozen=True, tag="cell"):
    """The sum over devices of a block, by name: in a group, its number there, or its numbers if it has several.

    Of bins that are as many as groups it is the number of the bin in the group's place.
    """

    block: str


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """The sums over devices of a block in every group that is shown: what shares are of."""

    block: str


class Group(msgspec.Struct, frozen=True, tag="group"):
    """The value of a key, by its place among the keys."""

    key: int


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A function of values, by its name in `fedcore.questions.functions`."""

    function: str
    arguments: tuple[Value, ...]


Value: TypeAlias = Number | Cell | Shown | Group | Call
"""What a column shows: an expression over sums."""


class Column(msgspec.Struct, frozen=True):
    """A column of the table."""

    name: str
    value: Value


class Order(msgspec.Struct, frozen=True):
    """By which column the table is sorted, counted from 0."""

    column: int
    descending: bool = False


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question. Raises QuestionError when its parts do not fit together.

    text: as it was asked, with its bounds; owners of devices read it. voters: the block of kind "any" or "bins" that
    counts the devices of each group, or of all at once; a group of fewer than minimum_devices is not shown. most_rows:
    of a device, drawn at random; None for all. private: whether blocks are divided by their norms, so that a clip holds
    them together. limit: the most rows of the table.
    """

    text: str
    rows: tuple[Rows, ...]
    blocks: tuple[Block, ...]
    columns: tuple[Column, ...]
    voters: str
    keys: tuple[Key, ...] = ()
    minimum_devices: int = 1
    most_rows: int | None = None
    private: bool = False
    order: tuple[Order, ...] = ()
    limit: int | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "text", " ".join(self.text.split()))
        _check(self)

    @property
    def groups(self) -> int:
        """G, the number of groups; 1 without keys."""
        return math.prod(len(key.values) for key in self.keys)

    @property
    def row_numbers(self) -> int:
        """R, the numbers of a row, with both words of those that have two."""
        return sum(rows.size * (1 + rows.words) for rows in self.rows)

    def groups_of(self, block: Block) -> int:
        """For how many groups a block has numbers: for each, or 1 where it is of all."""
        size = len(block.edges) + 1 if block.kind == "bins" else self.block_sizes[self.vectors(block)[0]]
        grouped = size == self.groups if block.kind == "bins" else size % self.groups == 0
        return self.groups if grouped else 1

    def vectors(self, block: Block) -> tuple[str, ...]:
        """The names of the vectors that a device sends of a block: two of words, else one."""
        rows = next(rows for rows in self.rows if rows.name == block.of)
        return words_of(block.name) if rows.words else (block.name,)

    @property
    def block_sizes(self) -> dict[str, int]:
        """The numbers of every vector that a device sends, by name, in order. Of words there are two vectors."""
        rows, sizes = {rows.name: rows for rows in self.rows}, dict[str, int]()
        for block in self.blocks:
            size = len(block.edges) + 1 if block.kind == "bins" else rows[block.of].size
            sizes |= dict.fromkeys(self.vectors(block), size)
        return sizes

    @property
    def clip(self) -> float:
        """The L2 norm that no device's report exceeds once every block is divided by its norm."""
        return math.sqrt(len(self.blocks))

    def encode(self) -> str:
        """JSON: equal questions give equal texts."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @classmethod
    def decode(cls, text: str) -> Question:
        """A question from JSON. Raises QuestionError."""
        return decoded(text, _QUESTION, "question", QuestionError)


def words_of(name: str) -> tuple[str, str]:
    """The names of the low and the high words of a number called `name`."""
    return f"{name}_low", f"{name}_high"


def _check(question: Question) -> None:
    rows = {one.name: one for one in question.rows}
    blocks = {one.name: one for one in question.blocks}
    if not rows or len(rows) < len(question.rows) or not blocks or len(blocks) < len(question.blocks):
        raise QuestionError("a question needs rows and blocks, each with a name of its own")
    if not all(map(str.isidentifier, (*rows, *blocks))):
        raise QuestionError(f"names are made of letters, digits and _, not {sorted({*rows, *blocks})}")
    for block in blocks.values():
        _check_block(block, rows)
    _check_sizes(question)
    voters = blocks.get(question.voters)
    if voters is None or voters.kind == "sum" or question.block_sizes[voters.name] not in (1, question.groups):
        raise QuestionError("voters must name a block that counts devices, with one number for every group or for all")
    if not question.columns or question.minimum_devices < 1 or (question.most_rows or 1) < 1:
        raise QuestionError("a question needs columns, and at least 1 device and 1 row")
    for column in question.columns:
        _check_value(column.value, question)


def _check_sizes(question: Question) -> None:
    if any(one.size < 1 for one in question.rows) or question.row_numbers > MOST_CELLS:
        raise QuestionError(f"a row has {question.row_numbers:,} numbers; there may be {MOST_CELLS:,}")
    if len(question.blocks) > MOST_BLOCKS:
        raise QuestionError(f"a question has {len(question.blocks)} blocks; there may be {MOST_BLOCKS}: ask for less")
    if sum(question.block_sizes.values()) > MOST_CELLS:
        raise QuestionError(f"a report would have more than {MOST_CELLS:,} numbers")
    if not 0 < len(question.text) <= LONGEST_QUESTION:
        raise QuestionError(f"a question of {len(question.text):,} characters; there may be {LONGEST_QUESTION:,}")


def _check_block(block: Block, rows: dict[str, Rows]) -> None:
    of = rows.get(block.of)
    if of is None:
        raise QuestionError(f"block {block.name} is of {block.of}, which no row has")
    if block.kind != "sum" and of.words:
        raise QuestionError(f"block {block.name} of kind {block.kind} is of words, which only sums are made of")
    if block.kind == "bins" and (of.size != 1 or not block.edges or list(block.edges) != sorted(set(block.edges))):
        raise QuestionError(f"block {block.name} needs one number, and edges in ascending order")
    if not all(map(math.isfinite, (block.low or 0, block.high or 0, block.norm, *block.edges))) or block.norm <= 0:
        raise QuestionError(f"block {block.name} has bounds or a norm that are not finite, or no norm")
    if block.low is not None and block.high is not None and not block.low <= 0 <= block.high:
        raise QuestionError(f"block {block.name} has bounds {block.low:g} to {block.high:g}, without 0")


def _check_value(value: Value, question: Question, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise QuestionError(f"a column nests more than {DEEPEST} functions")
    if isinstance(value, Cell | Shown) and value.block not in {block.name for block in question.blocks}:
        raise QuestionError(f"a column shows {value.block}, which is no block")
    if isinstance(value, Group) and not 0 <= value.key < len(question.keys):
        raise QuestionError(f"a column shows key {value.key}; there are {len(question.keys)}")
    if isinstance(value, Call) and value.function not in FUNCTIONS:
        raise QuestionError(f"a column calls {value.function!r}; {offered(value.function, FUNCTIONS)}")
    for argument in value.arguments if isinstance(value, Call) else ():
        _check_value(argument, question, depth + 1)


_QUESTION = decoder(Question)
