"""The cohorts of a training: which clients train in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcore.schedule import ServerSchedule, first_of_pair
from simulator.errors import EngineError
from simulator.population import Population, draw

_POISSON, _GROUPS = 1 << 62, 1 << 61
"""Keys of further draws: added to a round's number, or used instead of it, they never collide with a plain number."""


@dataclass(frozen=True, slots=True)
class Cohorts:
    """The cohorts of a training. first: the number of clients in round 1, from which the schedule lets it grow.

    same: whether the second of two trips has the clients of the first. separation: the least number of rounds from one
    participation of a client to its next; clients are divided into this many groups, which take turns. poisson: whether
    every client is drawn independently, so that only the mean of the sizes is right. given: those of every round, as
    numbers that are taken modulo the number of clients, in place of all draws.
    """

    first: int
    schedule: ServerSchedule = ServerSchedule()
    same: bool = False
    separation: int = 1
    poisson: bool = False
    given: Sequence[Sequence[int]] = ()

    def draw(self, number: int, clients: Population, seed: int) -> list[int]:
        """The clients that train in round `number`, drawn uniformly unless they are given."""
        if self.given:
            return sorted({one % len(clients) for one in self.given[number - 1]})
        size, drawn_in = self.size(number), self._drawn_in(number)
        if self.poisson:
            chances = np.random.Generator(np.random.Philox(key=[seed, _POISSON + drawn_in])).random(len(clients))
            return np.flatnonzero(chances * len(clients) < size).tolist()
        if self.separation == 1:
            return clients.sample(size, seed, drawn_in)
        group = draw(len(clients), len(clients), seed, _GROUPS)[number % self.separation :: self.separation]
        return [group[place] for place in draw(len(group), size, seed, drawn_in)]

    def size(self, number: int) -> int:
        """Clients that train in round `number`."""
        return self.schedule.cohort(self._drawn_in(number), self.first)

    def check(self, rounds: int, clients: int, held_out: int) -> None:
        """Raise EngineError unless there are enough clients for all rounds. held_out: the number that never train."""
        largest = self.schedule.cohort(rounds, self.first)
        if largest > clients // self.separation:
            groups = f" in {self.separation} groups that take turns" if self.separation > 1 else ""
            raise EngineError(
                f"a cohort of {largest} cannot be drawn from {clients} clients{groups}: of {clients + held_out} users "
                f"{held_out} are held out; take a smaller cohort, or more users"
            )

    def _drawn_in(self, number: int) -> int:
        return first_of_pair(number) if self.same else number
