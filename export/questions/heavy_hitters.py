"""The model of heavy hitters: which cell of a prefix tree each example votes for, and the tree as its parameters.

Shapes: B examples, T bits of a value, N digits, C candidates. The graph cuts a value into digits, compares them with
those of every candidate, and gives the number of the cell, from 1, of the candidate with which the value begins and of
how it goes on. It is 0 for a value that no candidate begins, and for one with a letter beyond the field's range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from export.model import ModelSpec
from export.questions.asked import CompiledQuestion
from export.questions.draft import field_of, taken_apart
from fedcore.algorithms import create, settings_of
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.heavy_hitters import CELL, HeavyHitters
from fedcore.errors import InvalidSetting, QuestionError
from fedcore.plan import Field
from fedcore.questions.question import UNKNOWN, PrefixTree

HEAVY_HITTERS = "heavy-hitters"
OPTIONS = "candidates", "step_bits"
MOST_ROUNDS = 64


class _Tree(nn.Module):
    """The tensors of a prefix tree. Devices are given digits of candidates (N, C), and zeros for the answer so far."""

    prefixes: Tensor

    def __init__(self, tree: PrefixTree) -> None:
        super().__init__()
        for name, shape in tree.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self) -> Tensor:
        """The digits of the candidates."""
        return self.prefixes


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells that examples vote for. high: every letter, or number, of a value is below it."""

    high: int
    tree: PrefixTree

    def __call__(self, prefixes_NC: Tensor, values: Tensor) -> Tensor:
        """The number of a cell for each example, (B,)."""
        tree = self.tree
        letters = values.reshape(values.shape[0], max(tree.letters, 1))
        valid_B = ((letters >= 0) & (letters < self.high)).to(torch.float32).sum(1) > max(tree.letters, 1) - 0.5
        digits_BN = self._digits(letters)
        known_NC = (prefixes_NC > UNKNOWN + 0.5).to(torch.float32)
        # A place that is not known yet suits every digit; that of no candidate (DEAD) suits none.
        apart_NC = 1.0 - (prefixes_NC == UNKNOWN).to(torch.float32)
        other_BNC = (digits_BN[:, :, None] != prefixes_NC).to(torch.float32) * apart_NC
        begins_BC = (other_BNC.sum(1) < 0.5).to(torch.float32)
        depth_C = known_NC.sum(0)
        place_N1 = torch.arange(tree.digits, dtype=torch.float32)[:, None]
        next_BC = digits_BN @ (place_N1 == depth_C).to(torch.float32)
        rest_BC = digits_BN @ (place_N1 > depth_C - 0.5).to(torch.float32)
        ways = 2**tree.step_bits
        goes_on_BC = torch.where(rest_BC < 0.5, torch.full_like(next_BC, float(ways)), next_BC)
        numbers_C = torch.arange(tree.candidates, dtype=torch.float32) * (ways + 1) + 1
        cells_B: Tensor = (begins_BC * (numbers_C + goes_on_BC)).sum(1)
        return cells_B * valid_B.to(torch.float32)

    def _digits(self, letters: Tensor) -> Tensor:
        """(B, N), of whole numbers (B, letters)."""
        tree = self.tree
        powers = torch.tensor([2**bit for bit in range(tree.bits - 1, -1, -1)])
        bits_BT = (torch.div(letters[:, :, None], powers, rounding_mode="floor") % 2).reshape(-1, tree.value_bits)
        rows = [
            [float(2**bit) if place == digit else 0.0 for place in range(tree.digits)]
            for digit, width in enumerate(tree.widths)
            for bit in range(width - 1, -1, -1)
        ]
        return bits_BT.to(torch.float32) @ torch.tensor(rows)


class AskedHitters(NamedTuple):
    """The question which values of a field most devices have. private: with noise to come."""

    field: Field
    hitters: HeavyHitters
    private: bool

    @property
    def fields(self) -> tuple[Field, ...]:
        """The field."""
        return (self.field,)

    @property
    def text(self) -> str:
        """What owners of devices read."""
        return self.hitters.text

    @property
    def minimum_devices(self) -> int:
        """The least devices of a value that is shown, and of a beginning that devices receive."""
        return self.hitters.minimum_devices

    @property
    def clip(self) -> float:
        """The root of the examples that vote: no votes of one device are longer."""
        return math.sqrt(self.hitters.values)

    @property
    def rounds(self) -> int:
        """The rounds that find whole values. Devices take part in each."""
        return self.hitters.tree.rounds

    def spec(self) -> ModelSpec:
        """The model."""
        tree = self.hitters.tree
        return ModelSpec(
            name="question",
            make=lambda: _Tree(tree),
            inputs=(),
            label=self.field,
            loss=lambda prefixes, values: torch.zeros(values.shape[:1]),
            metrics={CELL: _Cells(self.field.high or 0, tree)},
        )

    def algorithm(self) -> Algorithm:
        """The algorithm; with noise to come, one whose reports are held to `clip`."""
        clip = {"clip_norm": self.clip} if self.private else {}
        return create(self.hitters.name, {**settings_of(self.hitters), **clip})


AnyQuestion: TypeAlias = CompiledQuestion | AskedHitters
"""What is asked: a question of SQL or by name, or heavy hitters."""


def heavy_hitters(
    name: str,
    fields: Sequence[Field],
    *,
    minimum_devices: int = 20,
    most_rows: int = 1,
    private: bool = False,
    **settings: int,
) -> AskedHitters:
    """Which values of the field `name` most devices have.

    most_rows: the examples of a device that vote in a round, drawn at random. private: noise is to come. settings: of
    the algorithm, candidates and step_bits. Raises QuestionError for a field that is not there, or whose values are
    neither words nor whole numbers, and for settings that cannot be.
    """
    field = field_of(name, fields)
    letters, high = _letters(field), 256 if field.dtype == "uint8" and field.high is None else field.high
    if high is None:
        raise QuestionError(f"{name} holds whole numbers without an end: say it, as {name}:{field.dtype}:1000000")
    bits = max((high - 1).bit_length(), 1)
    sizes = {"letters": letters, "bits": bits, "values": most_rows, "minimum_devices": minimum_devices}
    try:
        made = cast("HeavyHitters", create(HeavyHitters.name, {"of": name, **sizes, **settings}))
    except InvalidSetting as error:
        raise QuestionError(str(error)) from error
    if made.tree.rounds > MOST_ROUNDS:
        raise QuestionError(
            f"{name} has values of {made.tree.value_bits:,} bits, which would take {made.tree.rounds:,} rounds; there "
            f"may be {MOST_ROUNDS}"
        )
    return AskedHitters(replace(field, high=high), made, private)


def heavy_hitters_in_words(
    words: Sequence[str], fields: Sequence[Field], *, minimum_devices: int = 20, private: bool = False
) -> AskedHitters:
    """The same in words: `heavy-hitters FIELD [candidates=64] [step_bits=7] [MAX n ROWS PER DEVICE]`.

    One row votes unless it is said. Raises QuestionError.
    """
    (_, *names), given, most_rows = taken_apart(words, [f"{option}=" for option in OPTIONS])
    if len(names) != 1:
        raise QuestionError(f"{HEAVY_HITTERS} asks about 1 field, not {len(names)}")
    try:
        settings = {key: int(value) for key, value in given.items()}
    except ValueError as error:
        raise QuestionError(f"candidates and step_bits are whole numbers: {error}") from None
    return heavy_hitters(
        names[0], fields, minimum_devices=minimum_devices, most_rows=most_rows or 1, private=private, **settings
    )


def _letters(field: Field) -> int:
    """The letters of a word; 0 for a field of one whole number. Raises QuestionError for other fields."""
    if field.dtype == "float32":
        raise QuestionError(f"{field.name} holds real numbers, which hardly repeat: ask for its histogram")
    if not field.shape:
        return 0
    if len(field.shape) > 1 or field.dtype != "uint8":
        size = " × ".join(map(str, field.shape))
        raise QuestionError(
            f"{field.name} is an array of {size} {field.dtype}: heavy hitters are of words, uint8 with a zero behind "
            "the last letter, and of single whole numbers"
        )
    return field.shape[0]
