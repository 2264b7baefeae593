"""The cohorts of a training, and the noise on their sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcore.algorithms.algorithm import Broadcast
from fedcore.errors import PrivacyError
from fedcore.privacy.accounting import NoiseOfRounds, calibrated, spent
from fedcore.privacy.settings import LedgerEntry, Noise, Privacy, WholeFromOne
from fedcore.release import CLIP
from fedcore.schedule import ServerSchedule, first_of_pair
from fedcore.validation import Count, checked, setting
from simulator.configuration import PrivateTraining
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


_NOISE = 1 << 60
"""Added to a round's number it keys its noise, apart from all that the number alone keys."""


def promise_of(asked: PrivateTraining, users: int, cohorts: Cohorts, rounds: int, square: int = 0) -> SimulatedPrivacy:
    """The noise and budget of so many rounds over so many users. Raises PrivacyError naming what is wrong.

    square: as in `SimulatedPrivacy`.
    """
    together = 2 if asked.poisson and cohorts.same else 1
    promise = SimulatedPrivacy(
        epsilon=asked.epsilon or 1.0,
        delta=asked.delta,
        users=users,
        noise_multiplier=asked.noise_multiplier or 1.0,
        mechanism=asked.mechanism,
        min_separation_rounds=asked.min_separation_rounds,
        bands=asked.bands,
        sampling_probability=cohorts.first / users if asked.poisson else 1.0,
        square=square if asked.mechanism == "distributed" else 0,
        rounds_of_a_draw=together,
    )
    if asked.epsilon:
        draws = math.ceil(rounds / together)
        multiplier = math.sqrt(together) * calibrated(row_of(promise, square), draws, asked.epsilon, asked.delta)
        return msgspec.structs.replace(promise, noise_multiplier=multiplier)
    return msgspec.structs.replace(promise, epsilon=promise.spent(rounds))


def row_of(noise: Noise, square: int) -> Noise:
    """What a round with such noise adds to a ledger, as far as it is accounted."""
    if noise.mechanism != "distributed" or not square:
        return noise
    parts = {name: getattr(noise, name) for name in Noise.__struct_fields__}
    return LedgerEntry(**parts, round=0, clip=1.0, devices=0, square=square)


@checked(PrivacyError)
class SimulatedPrivacy(Privacy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The privacy of a simulation: all that ε of its rounds is computed from.

    square is 0 unless devices add the noise. rounds_of_a_draw is 2 where those whom Poisson sampling drew are in both
    rounds of a pair.
    """

    square: Annotated[Count, setting("Greatest squared L2 norm of a report, in steps of its rounding.")] = 0
    rounds_of_a_draw: Annotated[WholeFromOne, setting("Rounds that have one cohort.")] = 1

    def spent(self, rounds: int) -> float:
        """ε at δ of so many rounds.

        The sums of n rounds with one cohort are together one sum of a vector √n times as long, also where the later
        ones depend on the first: they are one draw with noise that is smaller by √n.
        """
        draws, rest = divmod(rounds, self.rounds_of_a_draw)
        one = row_of(self, self.square)
        multiplier = self.noise_multiplier / math.sqrt(self.rounds_of_a_draw)
        whole = msgspec.structs.replace(one, noise_multiplier=multiplier)
        return spent([whole] * draws + [one] * rest, self.delta)


class PrivateSums:
    """The noise on the sums of rounds.

    privacy: its size, and how it is correlated. seed: keys the noise, which a simulation draws from an ordinary
    generator: nobody's data hides behind it.
    """

    def __init__(self, privacy: SimulatedPrivacy, seed: int) -> None:
        self.privacy, self._seed, self._size = privacy, seed, 0
        self._noise = NoiseOfRounds(privacy, self._normal)

    def mean(self, sums: Mapping[str, Tensor], broadcast: Broadcast, number: int, cohort: int) -> dict[str, Tensor]:
        """The noisy mean of the summed reports of a round, from 1: over `cohort`, however many users came. float64."""
        bound, sizes = float(broadcast[CLIP][0]), [value.numel() for value in sums.values()]
        total = torch.cat(list(sums.values())).double().cpu().numpy()
        self._size = total.size
        noisy = torch.from_numpy(self.noisy(total / bound, number) * (bound / cohort))
        return {
            name: one.to(value.device)
            for (name, value), one in zip(sums.items(), torch.split(noisy, sizes), strict=True)
        }

    def noisy(self, total: NDArray[np.float64], number: int) -> NDArray[np.float64]:
        """The sum of a round with its noise, both in units of the bound. That of devices is in the sum already."""
        if self.privacy.noise_of_devices:
            return total
        return total + self.privacy.noise_multiplier * self._noise.at(number)

    def _normal(self, step: int) -> NDArray[np.float64]:
        return np.random.Generator(np.random.Philox(key=[self._seed, _NOISE + step])).standard_normal(self._size)
