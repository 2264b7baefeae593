"""Groups of a secure round, whose devices are summed together, and the processes that take the masks off.

Spec: docs/spec/wire.md §8. Time is an argument of its methods.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from coordinator.errors import BeaconUnavailable, Unavailable
from fedcore.wire.messages import RequestBeacon
from secagg.errors import BadShare, BadVector, BelowThreshold, SecaggError, SumOutOfRange
from secagg.masking import Words
from secagg.server import Server
from secagg.session import ExpectedVector, PhaseEnd, SessionPhase, UnmaskedSum, Unmasking


class RemoteUploads:
    """The claims of one session, by slot. A report is in one sum only, since one replica at a time has the claim.

    dropped: the slots of reports that a replica was taking when its sum came, or was given up.
    """

    def __init__(self) -> None:
        self._claims: dict[int, tuple[str, str]] = {}
        """Of reports that are not added yet: the replica that may add it, and the digest."""
        self._added: dict[str, dict[int, bytes]] = {}
        """By replica, the signatures of the reports that it has added."""
        self._handed, self.dropped = set[str](), set[int]()

    def claim(self, slot: int, replica: str, sha256: str) -> None:
        """Let a replica add the report of a slot. Raises Unavailable while another may, or after its hand-over."""
        self.check_free(slot, replica)
        if replica in self._handed:
            raise Unavailable("this replica has handed its sum over; send the message again")
        self._claims[slot] = replica, sha256

    def check_free(self, slot: int, replica: str = "") -> None:
        """Raise Unavailable while another replica than this one may add the report of a slot."""
        if slot in self._claims and self._claims[slot][0] != replica:
            raise Unavailable("another replica is taking this message; send it again")

    def claimed(self, slot: int) -> bool:
        """Whether a replica may add the report of a slot, and has not told that it did."""
        return slot in self._claims

    def added(self, replica: str, signatures: Mapping[int, bytes]) -> dict[int, str]:
        """A replica has added these reports: the digests of those that are new, by slot."""
        new = {
            slot: sha256 for slot, (owner, sha256) in self._claims.items() if owner == replica and slot in signatures
        }
        for slot in new:
            del self._claims[slot]
            self._added.setdefault(replica, {})[slot] = signatures[slot]
        return new

    def release(self, replica: str, checking: Collection[int] = ()) -> None:
        """Drop the claims of a replica that came to nothing: of reports that it is not `checking`."""
        self._claims = {slot: claim for slot, claim in self._claims.items() if claim[0] != replica or slot in checking}

    def in_sum_of(self, replica: str) -> Mapping[int, bytes]:
        """The signatures of the reports that a replica has added, by slot."""
        return self._added.get(replica, {})

    def hand_over(self, replica: str) -> None:
        """The sum of a replica is here. What it was checking will be in none."""
        self._handed.add(replica)
        self.dropped.update(slot for slot, (owner, _) in self._claims.items() if owner == replica)
        self.release(replica)

    def handed(self, replica: str) -> bool:
        """Whether the sum of a replica is here, or not waited for any more."""
        return replica in self._handed

    @property
    def owing(self) -> set[str]:
        """The replicas that may add reports, or have, and whose sums are not here."""
        return ({replica for replica, _ in self._claims.values()} | self._added.keys()) - self._handed

    def give_up(self, replica: str) -> set[int]:
        """Wait for the sum of a replica no more: the slots of reports that are lost with it."""
        lost = set(self._added.pop(replica, ()))
        self.hand_over(replica)
        return lost


_LOG = logging.getLogger(__name__)

StartUnmasking: TypeAlias = Callable[[Unmasking], Future[UnmaskedSum]]
"""Has the masks taken off a sum, by another thread or process."""
StartDrawing: TypeAlias = Callable[[RequestBeacon], Future[bytes]]
"""Has the authority asked for a beacon, by another thread."""


class Executors(NamedTuple):
    """The work of secure rounds that other threads and processes do, so that no device waits for it."""

    unmask: StartUnmasking
    draw: StartDrawing


class Group:
    """One session, and the slots that its phase waits for until the time is up.

    remote: the masked reports that other replicas add. session: its id, once one of them may. sum: the session's sum,
    once it is there. failure: the reason why there will be none.
    """

    def __init__(self, server: Server, executors: Executors, slots: Collection[int], until: float) -> None:
        self._server, self._executors = server, executors
        self._due, self._sent, self._until = set(slots), set[int](), until
        self._silent = set[int]()
        """The slots of devices that are heard if they speak again, and not waited for."""
        self._not_before = -math.inf
        self._survivors: frozenset[int] | None = None
        self._drawing: Future[bytes] | None = None
        self._unmasking: Future[UnmaskedSum] | None = None
        self._dealers: frozenset[int] = frozenset()
        self.remote = RemoteUploads()
        self.session = b""
        self.sum: UnmaskedSum | None = None
        self.failure: str | None = None

    @property
    def phase(self) -> SessionPhase:
        """The phase of the session."""
        return self._server.phase

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.sum is not None or self.failure is not None

    @property
    def unmasking(self) -> bool:
        """Whether its sum is being made, and no device is waited for."""
        return self._unmasking is not None and not self.over

    @property
    def suspects(self) -> frozenset[int]:
        """The slots of devices that it goes on without, or failed for, because their boxes or shares were false.

        Where one device's word is against another's both are among them.
        """
        return self._server.suspects | self._dealers

    @property
    def counted(self) -> int:
        """The number of masked reports in its sum; until they are all in, the number that may still be."""
        if self.failure is not None:
            return 0
        if self._survivors is not None:
            return len(self._survivors)
        return len(self._due | self._sent if self.phase is SessionPhase.UPLOADING else self._due)

    @property
    def in_sum(self) -> frozenset[int]:
        """The slots of the devices whose masked reports are in its sum, once that is decided."""
        return frozenset() if self.failure is not None or self._survivors is None else self._survivors

    @property
    def present(self) -> int:
        """The number of devices that have sent the message that is due."""
        return len(self._sent)

    @property
    def asked(self) -> int:
        """The number of devices that the phase waits for, with those that have sent."""
        return len(self._due | self._sent)

    @property
    def missing(self) -> set[int]:
        """The slots of devices that have not sent the message that is due, and are to blame for that."""
        if self.over or self.unmasking:
            return set()
        return (self._due | self._silent) - self._sent - self.remote.dropped

    def waits_for(self, slot: int) -> bool:
        """Whether a message of this slot is wanted, now or later."""
        return slot in self._due or slot in self._silent

    def is_due(self, now: float) -> bool:
        """Whether its phase ends now: everybody has sent, or the time is up; or the beacon is there."""
        if self._drawing is not None:
            return not self.over and self._drawing.done()
        if self.over or self._unmasking is not None or now < self._not_before:
            return False
        return self._due <= self._sent or now >= self._until

    def receive(self, slot: int, message: bytes, device: bytes) -> None:
        """Take in a message of the device with that id. A refusal, any SecaggError, changes nothing."""
        if self.phase is SessionPhase.UPLOADING:
            self.remote.check_free(slot)
        self._server.receive(slot, message, device)
        self._sent.add(slot)
        if slot in self._silent:
            self._silent.remove(slot)
            self._due.add(slot)

    def grant(self, slot: int, replica: str, sha256: str) -> ExpectedVector:
        """Let another replica add the masked report of a slot, and no other: what it must be.

        Raises SecaggError or Unavailable, which change nothing.
        """
        expected = self._server.expected(slot)
        self.remote.claim(slot, replica, sha256)
        self.session = expected.sid
        return expected

    def added(self, replica: str, signatures: Mapping[int, bytes]) -> dict[int, str]:
        """Another replica has added the masked reports of these slots: the digests of those that are new, by slot."""
        new = self.remote.added(replica, signatures)
        self._sent.update(new)
        return new

    def merge(self, replica: str, count: int, words: Words) -> set[int]:
        """Take the sum of another replica, once: of all the reports that it has added, which are `count`.

        Of another sum than that nothing is taken: then answers the slots of the devices that are lost with it.
        """
        if self.remote.handed(replica):
            return set()
        signatures = self.remote.in_sum_of(replica)
        try:
            if len(signatures) != count:
                raise BadVector(f"it has {count} reports, and {len(signatures)} were told of", [])
            self._server.merge(signatures, words)
        except SecaggError as error:
            _LOG.error("the masked sum of replica %s is not used: %s", replica, error)
            return self._give_up(replica)
        self.remote.hand_over(replica)
        return set()

    def give_up_sums(self) -> set[int]:
        """Go on without the sums of other replicas that are not here: the slots of the devices that are lost."""
        return set[int]().union(*(self._give_up(replica) for replica in self.remote.owing))

    def _give_up(self, replica: str) -> set[int]:
        lost = self.remote.give_up(replica)
        self._sent -= lost
        self._due -= lost
        return lost

    def end_by(self, until: float) -> None:
        """End the phase no later than that."""
        self._until = min(self._until, until)

    def end_after(self, time: float) -> None:
        """Do not end the phase before then, unless others join."""
        self._not_before = time

    def join(self, slots: Iterable[int]) -> None:
        """Wait for more devices, while they advertise."""
        self._due.update(slots)
        self._not_before = -math.inf

    def leave(self, slot: int) -> None:
        """Go on without a device."""
        self._due.discard(slot)

    def pass_over(self, slot: int) -> None:
        """Wait no more for a device whose masked report came, but hear it if it speaks again in time."""
        self._due.discard(slot)
        self._silent.add(slot)

    def divide(self, limit: int) -> dict[Group, list[int]]:
        """New groups of the devices that advertised and stayed, at random: as few as `limit` allows, of even size."""
        slots = sorted(self._due & self._sent)
        random.SystemRandom().shuffle(slots)
        count = max(1, -(-len(slots) // limit))
        parts = [slots[index::count] for index in range(count)]
        sessions = zip(self._server.divide(parts), parts, strict=True)
        return {Group(server, self._executors, part, self._until): part for server, part in sessions}

    def advance(self, until: float) -> Mapping[int, bytes]:
        """End the phase, without the devices that are missing: the next messages by slot.

        The next phase ends at `until`. A beacon is drawn elsewhere, until `is_due` finds it; after the last phase the
        sum is made elsewhere, until `settle` finds it.
        """
        end, uploading = PhaseEnd(), self.phase is SessionPhase.UPLOADING
        with self._failing():
            beacon, self._drawing = b"" if self._drawing is None else self._drawing.result(), None
            end = self._server.advance(beacon)
            if end.roster:
                self._drawing = self._executors.draw(self._request(end))
                self._sent = set(self._due)
                return {}
            if self.phase is SessionPhase.DRAWING:
                end = self._server.advance()
            if end.unmasking is not None:
                self._unmasking = self._executors.unmask(end.unmasking)
                return {}
            if uploading:
                self._survivors = frozenset(end.messages)
        self._due, self._sent, self._until = set(end.messages) & self._due, set(), until
        self._silent &= set(end.messages)
        return end.messages

    def settle(self) -> bool:
        """Take up the sum, or the failure to make it. Returns whether there was one to take up."""
        if not self.unmasking or self._unmasking is None or not self._unmasking.done():
            return False
        with self._failing():
            unmasked = self._unmasking.result()
            if unmasked.total.weight < unmasked.total.devices:
                raise SumOutOfRange(
                    f"the weights of {unmasked.total.devices} devices add up to {unmasked.total.weight}: one of them "
                    "took from the rest, as none weighs less than 1"
                )
            self._server.settle(unmasked)
            self.sum = unmasked
        return True

    def stop(self, reason: str) -> Mapping[int, bytes]:
        """End the session: from here on no share has any use. Results (M12) by slot."""
        for future in (self._drawing, self._unmasking):
            if future is not None:
                future.cancel()
        if not self.over:
            self.failure = reason
        self._server.abort()
        return self._server.results()

    def _request(self, end: PhaseEnd) -> RequestBeacon:
        chosen = self._server.parameters
        return RequestBeacon(
            invitation=self._server.invitation, roster=b"".join(end.roster), neighbours=chosen.k, shares=chosen.t
        )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        phase = self.phase.name.lower()
        try:
            yield
        except BelowThreshold as error:
            _LOG.info("a secure aggregation ended while %s: %s", phase, error)
            self.failure = "too-few-reports"
        except BeaconUnavailable as error:
            _LOG.warning("a secure aggregation ended without a beacon: %s", error)
            self._server.abort()
            self.failure = "no-beacon"
        except SumOutOfRange as error:
            _LOG.warning("the sum of a secure aggregation is not used: %s", error)
            self.failure = "sum-out-of-range"
        except BadShare as error:
            _LOG.warning("a secure aggregation failed while %s: %s", phase, error)
            self.failure, self._dealers = "culprits-known", self._server.slots(error.culprits)
        except SecaggError as error:
            _LOG.warning("a secure aggregation failed while %s: %s", phase, error)
            self.failure = "secagg-failed"
        except Exception:
            # A defect, or a worker process that died: this group has no sum, and the others go on.
            _LOG.exception("a secure aggregation failed while %s", phase)
            self.failure = "secagg-failed"


MOST_PROCESSES = 8


class Unmasker:
    """One sum after the other, each in slices on all processes. They start with the first sum, and stay."""

    def __init__(self) -> None:
        self._parts = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
        self._queue = ThreadPoolExecutor(1, "unmasker")
        self._workers: ProcessPoolExecutor | None = None

    def __call__(self, work: Unmasking) -> Future[UnmaskedSum]:
        """The sum, once it is there, or any SecaggError. After `close` there is none."""
        return self._queue.submit(self._run, work)

    def close(self) -> None:
        """End the processes. Work that they have not begun is cancelled, which is an exception in its future."""
        self._queue.shutdown(wait=False, cancel_futures=True)
        self._end_workers()
        self._queue.shutdown()
        self._end_workers()  # those that the last sum began with meanwhile

    def _end_workers(self) -> None:
        workers = self._workers
        if workers is not None:
            workers.shutdown(cancel_futures=True)

    def _run(self, work: Unmasking) -> UnmaskedSum:
        if self._workers is None:
            # Spawned, since a process with threads must not be forked.
            spawn = multiprocessing.get_context("spawn")
            self._workers = ProcessPoolExecutor(self._parts, spawn, initializer=_be_worker)
        try:
            return work.run(self._workers, self._parts)
        except BrokenExecutor:
            _LOG.exception("a process that takes masks off died; the sum is made without, and others start anew")
            self._end_workers()  # waits for those that the death of one ends too
            self._workers = None
            return work.run()


def _be_worker() -> None:
    """Ctrl-C is for the coordinator, which ends its workers; but when it is killed, they end by themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
