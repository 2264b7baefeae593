"""Returns of devices that were sent away, so that pacing counts each once until then. Spec: docs/spec/rounds.md §7.

A device carries its time in a token. Only what the last devices were told is remembered, so that none of them counts
again with an earlier token, or without one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from coordinator.rules.return_tokens import Generation, Return
from fedcore.wire.messages import RetryWindow

LIMIT = 1 << 16
"""Devices that are remembered, at about 300 bytes each. One that hides its token, or shows an old one, counts twice at
most as often as so many others were sent away since."""


class Told(NamedTuple):
    """When a device should come back, from now, and its token; "" without one."""

    retry: RetryWindow
    token: str = ""


class Visit(Protocol):
    """A device that came to a population, with its token or ""."""

    @property
    def population(self) -> str:
        """The population."""

    @property
    def device(self) -> str:
        """The id of the device."""

    @property
    def token(self) -> str:
        """The token of the device's last rejection, or ""."""


class Returns:
    """When devices may come back. For one thread at a time. key: the secret of all replicas, as it is now."""

    def __init__(self, key: Callable[[], bytes], limit: int = LIMIT) -> None:
        self._key = key
        self._limit = limit
        self._generations: dict[str, Generation] = {}
        self._told: OrderedDict[tuple[str, bytes], Return] = OrderedDict()

    def __len__(self) -> int:
        return len(self._told)

    def left(self, visit: Visit, now: float) -> Told | None:
        """The rest of its window for a device that comes too early, which changes nothing; None for any other.

        A visit counts if it is not too early: once with each token, and without one once until the time that was told.
        """
        generation = self.generation(visit.population)
        shown = generation.read(visit.device, visit.token) if visit.token else None
        told = self._told.get((visit.population, generation.mark(visit.device)))
        later = max((when for when in (shown, told) if when is not None), default=None)
        if later is None or now >= later.first:
            return None
        return Told(RetryWindow(later.first - now, later.last - now), generation.token(visit.device, later))

    def expect(self, visit: Visit, window: RetryWindow, now: float) -> Told:
        """Expect the device of a visit that counts within a window from now."""
        generation = self.generation(visit.population)
        told = Return(now + window.min_s, now + window.max_s)
        self._remember(visit.population, generation.mark(visit.device), told)
        return Told(window, generation.token(visit.device, told))

    def hear(self, population: str, mark: bytes, told: Return, now: float) -> bool:
        """Take over what another replica told a device with this mark; false if its visit does not count."""
        before = self._told.get((population, mark))
        if told.last <= now or (before is not None and now < before.first):
            return False
        self._remember(population, mark, told)
        return True

    def generation(self, population: str) -> Generation:
        """The tokens of a population that hold now."""
        generation = self._generations.get(population)
        if generation is None:
            generation = self._generations[population] = Generation.new(self._key(), population)
        return generation

    def follow(self, population: str, name: bytes) -> None:
        """Take over the generation of another replica by its name; if it is new here, every device may come."""
        if population not in self._generations or self._generations[population].name != name:
            self.forget({population})
            self._generations[population] = Generation(self._key(), population, name)

    def forget(self, populations: AbstractSet[str]) -> None:
        """Let every device of these populations come: a new generation begins."""
        for population in populations:
            self._generations.pop(population, None)
        for key in [key for key in self._told if key[0] in populations]:
            del self._told[key]

    def _remember(self, population: str, mark: bytes, told: Return) -> None:
        self._told[population, mark] = told
        self._told.move_to_end((population, mark))
        if len(self._told) > self._limit:
            self._told.popitem(last=False)
