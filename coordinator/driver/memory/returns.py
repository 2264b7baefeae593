"""Returns of devices that were sent away, so that pacing counts each once until then. Spec: docs/spec/rounds.md §7.

A device carries its time in a token. Only tokens that came back in time are remembered, until they expire, and the
last devices that came without one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from coordinator.rules.return_tokens import Generation, Return
from fedcore.wire.messages import RetryWindow

LIMIT = 1 << 14
"""Devices without a token that are remembered, at about 330 bytes each. One that comes too early is counted twice at
most as often as so many others came without a token since."""
_SWEEP_S = 60.0


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


class _Used(NamedTuple):
    """When a token that came back in time expires, and what its device was told then."""

    expires: float
    told: Return


class Returns:
    """When devices may come back. For one thread at a time. key: the secret of all replicas, as it is now."""

    def __init__(self, key: Callable[[], bytes], limit: int = LIMIT) -> None:
        self._key = key
        self._limit = limit
        self._generations: dict[str, Generation] = {}
        self._used: dict[tuple[str, str, Return], _Used] = {}
        self._newcomers: OrderedDict[tuple[str, str], Return] = OrderedDict()
        self._swept = -math.inf

    def __len__(self) -> int:
        return len(self._used) + len(self._newcomers)

    def left(self, visit: Visit, now: float) -> Told | None:
        """The rest of its window for a device that comes too early, which changes nothing; None for any other."""
        when = self._read(visit, now)
        told = self._told(visit, when) or when
        if told is None or now >= told.first:
            return None
        return Told(RetryWindow(told.first - now, told.last - now), self._token(visit, told))

    def counts(self, visit: Visit, now: float) -> bool:
        """Whether a visit counts: once with each token, and without one once until the time that was told."""
        when = self._read(visit, now)
        told = self._told(visit, when)
        return told is None or (when is None and now >= told.first)

    def expect(self, visit: Visit, window: RetryWindow, now: float) -> Told:
        """Expect the device of a visit that counts within a window from now."""
        self._sweep(now)
        told, when = Return(now + window.min_s, now + window.max_s), self._read(visit, now)
        if when is not None:
            self._used[visit.population, visit.device, when] = _Used(when.last, told)
        else:
            key = visit.population, visit.device
            self._newcomers[key] = told
            self._newcomers.move_to_end(key)
            if len(self._newcomers) > self._limit:
                self._newcomers.popitem(last=False)
        return Told(window, self._token(visit, told))

    def forget(self, populations: AbstractSet[str]) -> None:
        """Let every device of these populations come: a new generation begins."""
        for population in populations:
            self._generations.pop(population, None)
        self._used = {key: used for key, used in self._used.items() if key[0] not in populations}
        for key in [key for key in self._newcomers if key[0] in populations]:
            del self._newcomers[key]

    def _read(self, visit: Visit, now: float) -> Return | None:
        """The times in a visit's token; None without one that holds now."""
        when = self._generation(visit.population).read(visit.device, visit.token) if visit.token else None
        return None if when is None or when.last < now else when

    def _told(self, visit: Visit, when: Return | None) -> Return | None:
        """What the device was told when it came with this token, or without one, before."""
        if when is None:
            return self._newcomers.get((visit.population, visit.device))
        used = self._used.get((visit.population, visit.device, when))
        return None if used is None else used.told

    def _token(self, visit: Visit, told: Return) -> str:
        return self._generation(visit.population).token(visit.device, told)

    def _generation(self, population: str) -> Generation:
        generation = self._generations.get(population)
        if generation is None:
            generation = self._generations[population] = Generation.new(self._key(), population)
        return generation

    def _sweep(self, now: float) -> None:
        """Forget what has expired; once a minute is often enough."""
        if now < self._swept + _SWEEP_S:
            return
        self._swept = now
        self._used = {key: used for key, used in self._used.items() if now <= used.expires}
