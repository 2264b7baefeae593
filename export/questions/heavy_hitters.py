"""The model of heavy hitters: which cell of a prefix tree each example votes for, and the tree as its parameters.

Shapes: B examples, T bits of a value, N digits, C candidates. The graph cuts a value into digits, compares them with
those of every candidate, and gives the number of the cell, from 1, of the candidate with which the value begins and of
how it goes on. It is 0 for a value that no candidate begins, and for one with a letter beyond the field's range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from export.model import ModelSpec
from export.questions.measured import field_of
from fedcore.algorithms import create, settings_of
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.heavy_hitters import CELL, HeavyHitters
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.questions.prefix_tree import PREFIXES, UNKNOWN, PrefixTree

CANDIDATES, STEP_BITS = 64, 7


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
    """The cells that examples vote for. field: of the values."""

    field: Field
    tree: PrefixTree

    def __call__(self, prefixes_NC: Tensor, values: Tensor) -> Tensor:
        """The number of a cell for each example, (B,)."""
        tree, high = self.tree, self.field.high
        letters = values.reshape(values.shape[0], max(tree.letters, 1))
        valid_B = ((letters >= 0) & (letters < high)).to(torch.float32).sum(1) > max(tree.letters, 1) - 0.5
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
        return (begins_BC * (numbers_C + goes_on_BC)).sum(1) * valid_B.to(torch.float32)

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
    def rounds(self) -> int:
        """The rounds that find whole values."""
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
            metrics={CELL: _Cells(self.field, tree)},
        )

    def algorithm(self) -> Algorithm:
        """The algorithm; with noise to come, one whose reports are held to the norm that no vote exceeds."""
        clip = {"clip_norm": math.sqrt(self.hitters.values)} if self.private else {}
        return create(self.hitters.name, {**settings_of(self.hitters), **clip})
