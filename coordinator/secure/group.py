"""A group of a secure round: devices that are summed together, in a session of SA1 of their own.

Spec: docs/spec/wire.md §8. Whoever holds a group tells it the time.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeAlias

from secagg.errors import BelowThreshold, SecaggError
from secagg.server import Phase, Server
from secagg.unmasking import Aggregate, Unmasking

BEACON_BYTES = 32
_LOG = logging.getLogger(__name__)

Unmask: TypeAlias = Callable[[Unmasking], Future[Aggregate]]
"""Takes the masks off a sum, somewhere else."""


class Group:
    """One session, and the slots that its phase waits for until the time is up.

    aggregate: what came out. failure: the reason why nothing will.
    """

    def __init__(self, server: Server, slots: Collection[int], until: float) -> None:
        self._server = server
        self._due, self._here, self._until = set(slots), set[int](), until
        self._lingers_until = -math.inf
        self._survivors: int | None = None
        self._unmasking: Future[Aggregate] | None = None
        self.aggregate: Aggregate | None = None
        self.failure: str | None = None

    @property
    def phase(self) -> Phase:
        """What is waited for."""
        return self._server.phase

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.aggregate is not None or self.failure is not None

    @property
    def unmasking(self) -> bool:
        """Whether its sum is being made, and no device waited for."""
        return self._unmasking is not None and not self.over

    @property
    def counted(self) -> int:
        """How many masked reports are in its sum; how many may be, as long as they come in."""
        if self.failure is not None:
            return 0
        if self._survivors is not None:
            return self._survivors
        return len(self._due | self._here if self.phase is Phase.UPLOADING else self._due)

    @property
    def present(self) -> int:
        """How many have sent what the phase waits for."""
        return len(self._here)

    @property
    def asked(self) -> int:
        """How many the phase waits for, those that have sent with them."""
        return len(self._due | self._here)

    def waits_for(self, slot: int) -> bool:
        """Whether a message of this slot is wanted, now or later."""
        return slot in self._due

    def is_due(self, now: float) -> bool:
        """Whether its phase ends now: everybody has sent, or the time is up."""
        if self.over or self._unmasking is not None or now < self._lingers_until:
            return False
        return self._due <= self._here or now >= self._until

    def receive(self, slot: int, message: bytes) -> None:
        """Take in what a device sent. A refusal, any SecaggError, changes nothing."""
        self._server.receive(slot, message)
        self._here.add(slot)

    def hurry(self, until: float) -> None:
        """End the phase no later than that."""
        self._until = min(self._until, until)

    def linger(self, until: float) -> None:
        """Do not end the phase before then, unless others join."""
        self._lingers_until = until

    def join(self, slots: Iterable[int]) -> None:
        """Wait for more devices, while they advertise."""
        self._due.update(slots)
        self._lingers_until = -math.inf

    def leave(self, slot: int) -> None:
        """Go on without a device."""
        self._due.discard(slot)

    def divide(self, limit: int) -> dict[Group, list[int]]:
        """New groups of the devices that advertised and are still there, by lot: as few as `limit` allows, all even."""
        slots = sorted(self._due & self._here)
        random.SystemRandom().shuffle(slots)
        count = max(1, -(-len(slots) // limit))
        parts = [slots[index::count] for index in range(count)]
        sessions = self._server.divide(parts)
        return {Group(server, part, self._until): part for server, part in zip(sessions, parts, strict=True)}

    def close(self, until: float) -> dict[int, bytes]:
        """End the phase, whoever is missing: the next messages by slot. The next phase ends at `until`."""
        messages: dict[int, bytes] = {}
        with self._failing():
            if self.phase is Phase.ADVERTISING:
                self._server.fix_roster()
                messages = self._server.open_roster(secrets.token_bytes(BEACON_BYTES))
            elif self.phase is Phase.UPLOADING:
                messages = self._server.close_phase()
                self._survivors = len(messages)
            else:
                messages = self._server.close_phase()
        self._due, self._here, self._until = set(messages) & self._due, set(), until
        return messages

    def start_unmasking(self, unmask: Unmask) -> None:
        """End the last phase. The sum is made elsewhere, until `settle` finds it."""
        with self._failing():
            self._unmasking = unmask(self._server.unmasking())

    def settle(self) -> bool:
        """Take up what came of unmasking. Whether it is there."""
        if not self.unmasking or self._unmasking is None or not self._unmasking.done():
            return False
        with self._failing():
            self.aggregate = self._unmasking.result()
            self._server.settle(self.aggregate)
        return True

    def stop(self, reason: str) -> dict[int, bytes]:
        """Release no share any more, whatever comes: results (M10) by slot."""
        if self._unmasking is not None:
            self._unmasking.cancel()
        if not self.over:
            self.failure = reason
        self._server.abort()
        return self._server.results()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        phase = self.phase.name.lower()
        try:
            yield
        except BelowThreshold as error:
            _LOG.info("a secure aggregation ended while %s: %s", phase, error)
            self.failure = "too-few-reports"
        except SecaggError as error:
            _LOG.warning("a secure aggregation failed while %s: %s", phase, error)
            self.failure = "secagg-failed"
        except Exception:
            # Whatever it was, in a worker process say: this group has no sum, and others go on.
            _LOG.exception("a secure aggregation failed while %s", phase)
            self.failure = "secagg-failed"
