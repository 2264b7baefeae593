"""Devices that wait for a round, and those that the rounds of tasks gave back: what a twin and its tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Drawing:
    """Where devices come from and go to. waiting: rows that wait, each until when, the first first.

    shared: whether several tasks draw from them. drawn, free, turned_away: how many were drawn, whose work is over, and
    who is sent away, since the last look.
    """

    shared: bool = False
    waiting: dict[int, float] = field(default_factory=dict)
    drawn: int = 0
    free: list[int] = field(default_factory=list)
    turned_away: list[int] = field(default_factory=list)

    def turn_away(self, rows: Sequence[int]) -> None:
        """Send devices away that wait."""
        self.turned_away += rows
        for row in rows:
            del self.waiting[row]
