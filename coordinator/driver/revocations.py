"""Revocations of devices, which a running process reads from the audit log. Only the driver's thread uses it."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.driver.memory.in_memory_state import Memory
from coordinator.rules.audit import Action
from coordinator.store.records.records import Records


class Revocations:
    """The devices that were revoked since this process began: others have no key in its memory.

    Entries of the audit log become visible in the order of their numbers, so none is missed, whatever the clocks say.
    changed: hears the devices whenever they change.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._seen: int | None = None
        self._devices: frozenset[str] = frozenset()
        self.changed: Callable[[frozenset[str]], None] = lambda _: None

    def learn(self, records: Records) -> None:
        """Look for news: a revoked device stops waiting, and its assignments are lost."""
        last = records.audit.last()
        seen = last if self._seen is None else self._seen
        news = records.audit.about_devices(seen) if last > seen else []
        for device, action in news:
            if action is Action.DEVICE_ALLOWED:
                self._devices -= {device}
            else:
                self._devices |= {device}
        if news:
            self.changed(self._devices)
        for device in {device for device, _ in news} & self._devices:
            self._memory.revoke(device)
        self._seen = last
