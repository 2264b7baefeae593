"""The server's end of a session. Spec: docs/spec/secagg.md §7.

    server = Server(invite, key, authority)
    server.invitation                       M0, for everyone
    server.receive(slot, M1)  …             a slot is whatever number the host knows a device by
    root = server.fix_roster()              and now the beacon is drawn
    server.open_roster(beacon)              M2 by slot
    server.receive(slot, M3)  …
    server.close_phase()                    M4 by slot
    server.receive(slot, M5)  …
    server.close_phase()                    M6 by slot
    server.receive(slot, M7)  …             not in mode honest
    server.close_phase()                    M8 by slot; not in mode honest
    server.receive(slot, M9)  …
    server.unmask()                         the aggregate; or, in another process, server.unmasking().run()
    server.results()                        M10 by slot, also after a failure

A cohort that is too large for one session is divided once it has advertised: `server.divide(groups)` gives a session of
its own for each group, which goes on with `fix_roster`.

What `receive` refuses changes nothing, and the host may go on without that device. What any other step raises ends the
session. Memory is one vector and a little for each device, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secagg import keys, packing, parameters
from secagg.encoding import DIGEST
from secagg.errors import (
    BadShare,
    BadSignature,
    BadVector,
    BelowThreshold,
    DuplicateKey,
    DuplicateUpload,
    Malformed,
    OutOfOrder,
    PolicyViolation,
)
from secagg.graph import Graph
from secagg.masking import LITTLE, Words
from secagg.merkle import EMPTY, Tree, sha256
from secagg.messages import (
    ABORTED,
    ACTIVE,
    DONE,
    KEY_SHARE,
    SEED_SHARE,
    UNSIGNED,
    Advertise,
    Confirm,
    Confirmations,
    Deliver,
    Entry,
    Invite,
    Masked,
    Result,
    Roster,
    Shares,
    Survivors,
    Unmask,
    survivors_digest,
)
from secagg.parameters import Parameters
from secagg.session import check_advertisement, check_distinct, session_id
from secagg.shamir import PRIME
from secagg.unmasking import Aggregate, Revealed, Unmasking


class Phase(IntEnum):
    """What the server waits for: the number of the message that is due."""

    ADVERTISING = 1
    DRAWING = 2
    SHARING = 3
    UPLOADING = 5
    CONFIRMING = 7
    REVEALING = 9
    OVER = 10


DEVICE_MESSAGES = {Phase.ADVERTISING, Phase.SHARING, Phase.UPLOADING, Phase.CONFIRMING, Phase.REVEALING}


class Server:
    """A session over one cohort."""

    def __init__(
        self,
        invite: Invite,
        key: Ed25519PrivateKey,
        authority: bytes | None,
        choose: Callable[[int], Parameters] = parameters.find,
    ) -> None:
        """`choose` gives the parameters for a roster's size. Raises HeadroomError."""
        packing.check_headroom(invite.segments, invite.n_max)
        self._invite, self._key, self._authority, self._choose = invite, key, authority, choose
        self._active = invite.mode == ACTIVE
        self._invite_hash = invite.hash
        self.invitation = invite.body() + self._sign("invite", keys.NO_CONTEXT, self._invite_hash)
        self.phase = Phase.ADVERTISING
        self._advertised: dict[int, Advertise] = {}
        self._seen: set[bytes] = set()
        self._tree = Tree([b""])
        self._aggregate: Aggregate | None = None
        # By position, from here on.
        self.slots: tuple[int, ...] = ()
        self._devices: tuple[Advertise, ...] = ()
        self._neighbours: list[list[int]] = []
        self._shares: dict[int, Shares] = {}
        self._uploads: dict[int, bytes] = {}
        self._confirmed: dict[int, bytes] = {}
        self._revealed: dict[int, dict[int, int]] = {}
        self._sum: Words = np.zeros(0, np.uint64)

    def receive(self, slot: int, message: bytes) -> None:
        """Take in what a device sent. A refusal, any SecaggError, changes nothing."""
        if not message or message[0] not in DEVICE_MESSAGES:
            raise Malformed("no device sends such a message")
        if message[0] != self.phase:
            raise OutOfOrder(f"M{message[0]} came while the server is in phase {self.phase.name.lower()}")
        if self.phase is Phase.ADVERTISING:
            return self._advertise(slot, message)
        if slot not in self._positions:
            raise OutOfOrder(f"slot {slot} is not on the roster")
        take = {
            Phase.SHARING: self._share,
            Phase.UPLOADING: self._upload,
            Phase.CONFIRMING: self._confirm,
            Phase.REVEALING: self._reveal,
        }[self.phase]
        return take(self._positions[slot], message)

    def divide(self, groups: Sequence[Iterable[int]]) -> list[Server]:
        """A session for each of some disjoint groups of the slots that advertised; this one is then over."""
        with self._closing(Phase.ADVERTISING, Phase.OVER):
            return [self._of(group) for group in groups]

    def _of(self, group: Iterable[int]) -> Server:
        made = Server(self._invite, self._key, self._authority, self._choose)
        made._advertised = {slot: self._advertised[slot] for slot in group}
        return made

    def fix_roster(self) -> bytes:
        """End advertising. The roster's root, from which nobody may have been able to predict the beacon."""
        with self._closing(Phase.ADVERTISING, Phase.DRAWING):
            n = len(self._advertised)
            if n > self._invite.n_max:
                raise OutOfOrder(f"{n} devices advertised, and a roster holds {self._invite.n_max}: divide them first")
            if n < self._invite.min_sum:
                raise BelowThreshold(f"{n} devices advertised, and a sum must have {self._invite.min_sum}")
            try:
                self._parameters = self._choose(n)
            except PolicyViolation as error:  # no device would take part in so small a cohort
                raise BelowThreshold(str(error)) from error
            self.slots = tuple(sorted(self._advertised))
            self._positions = {slot: position for position, slot in enumerate(self.slots)}
            self._devices = tuple(self._advertised[slot] for slot in self.slots)
            self._tree = Tree([device.leaf for device in self._devices])
            return self._tree.root

    def open_roster(self, beacon: bytes) -> dict[int, bytes]:
        """M2 by slot. Raises Malformed unless `beacon` is 32 bytes."""
        with self._closing(Phase.DRAWING, Phase.SHARING):
            if len(beacon) != DIGEST:
                raise Malformed(f"a beacon has {DIGEST} bytes, not {len(beacon)}")
            chosen, root, n = self._parameters, self._tree.root, self._parameters.n
            self._sid = session_id(self._invite_hash, chosen, root, beacon)
            graph = Graph(chosen, root, beacon)
            self._neighbours = [graph.neighbours(position) for position in range(n)]
            paths = [self._tree.path(position) for position in range(n)]
            entries = [Entry(position, self._devices[position], paths[position]) for position in range(n)]
            return {
                slot: Roster(
                    n, chosen.k, chosen.t, root, beacon, position, paths[position],
                    tuple(entries[peer] for peer in self._neighbours[position]),
                ).encode(self._invite_hash)
                for slot, position in self._positions.items()
            }  # fmt: skip

    def close_phase(self) -> dict[int, bytes]:
        """End the phase, whoever is missing: the next messages by slot, for whoever is still there."""
        closers = {
            Phase.SHARING: self._deliver,
            Phase.UPLOADING: self._survivors,
            Phase.CONFIRMING: self._confirmations,
        }
        if self.phase not in closers:
            raise OutOfOrder(f"phase {self.phase.name.lower()} is not ended by close_phase")
        return {self.slots[position]: message for position, message in closers[self.phase]().items()}

    def unmask(self, executor: Executor | None = None, parts: int = 1) -> Aggregate:
        """The sum, from the shares that came. With an executor, its workers take `parts` slices of it.

        Raises BelowThreshold, BadShare or UnmaskCheckFailed, and then nothing of the sum was shown.
        """
        found = self.unmasking().run(executor, parts)
        self.settle(found)
        return found

    def unmasking(self) -> Unmasking:
        """End the last phase: what is left to do, and nothing of it stays here. Then `settle` what it gives."""
        with self._closing(Phase.REVEALING, Phase.OVER):
            commitments = {position: shares.commitment for position, shares in self._shares.items()}
            revealed = Revealed(
                self._sid, self._parameters, self._devices, self._neighbours, self._shared, self._alive,
                commitments, self._revealed,
            )  # fmt: skip
            work = Unmasking(revealed, self._sum, self._invite.segments, self._invite.w_max)
            self._forget()
            return work

    def settle(self, found: Aggregate) -> None:
        """The aggregate that `unmasking` gave: results say that the session came out, and what its sum was."""
        self._aggregate = found

    def results(self) -> dict[int, bytes]:
        """M10 by slot, once the session is over, for the whole roster; nothing if there never was one."""
        if self.phase is not Phase.OVER:
            raise OutOfOrder("the session goes on, so there is no result")
        if not self._neighbours:
            return {}
        status, digest = (DONE, self._aggregate.digest) if self._aggregate else (ABORTED, EMPTY)
        leaves = [self._uploads.get(position, UNSIGNED) for position in range(len(self.slots))]
        unsigned = Result(status, digest, Tree(leaves).root)
        signed = replace(unsigned, signature=self._sign("result", self._sid, unsigned.body()))
        return dict.fromkeys(self.slots, signed.encode(self._sid))

    def abort(self) -> None:
        """End the session without a sum, in whatever phase."""
        if self._aggregate is None:
            self.phase = Phase.OVER
            self._forget()

    def _forget(self) -> None:
        """Let go of what could take a mask off one device's vector, and of the sum's words."""
        self._shares, self._revealed = {}, {}
        self._sum = np.zeros(0, np.uint64)

    @contextmanager
    def _closing(self, phase: Phase, then: Phase) -> Iterator[None]:
        """Go from one phase to the next; whatever goes wrong in between ends the session."""
        if self.phase is not phase:
            raise OutOfOrder(f"the server is in phase {self.phase.name.lower()}, not {phase.name.lower()}")
        try:
            yield
        except BaseException:
            self.abort()
            raise
        self.phase = then

    def _sign(self, what: str, context: bytes, body: bytes) -> bytes:
        return keys.sign(self._key, what, context, body) if self._active else UNSIGNED

    def _advertise(self, slot: int, message: bytes) -> None:
        device = Advertise.decode(message, self._invite_hash)
        if slot in self._advertised:
            raise DuplicateUpload(f"slot {slot} advertised before")
        own = {device.id, device.mask_key, device.box_key}
        check_distinct([device])
        if own & self._seen:
            raise DuplicateKey(f"slot {slot} sent an id or key that another device has")
        for point in (device.mask_key, device.box_key):
            keys.check_point(point)
        if self._active:
            check_advertisement(device, self._invite_hash, self._authority)
        self._seen |= own
        self._advertised[slot] = device

    def _share(self, position: int, message: bytes) -> None:
        found = Shares.decode(message, self._sid, self._parameters.k)
        self._once(position, self._shares)
        self._shares[position] = found

    def _upload(self, position: int, message: bytes) -> None:
        if position not in self._shared:
            raise OutOfOrder(f"position {position} shared no secrets, so its mask could not be removed")
        self._once(position, self._uploads)
        try:
            found = Masked.decode(message, self._sid, packing.word_count(self._invite.segments))
            if self._active:
                keys.verify(self._devices[position].id, found.signature, "masked", self._sid, sha256(found.words))
        except (Malformed, BadSignature) as error:
            raise BadVector(f"the upload of position {position} is unusable: {error}", [position]) from error
        self._uploads[position] = found.signature
        self._sum += np.frombuffer(found.words, LITTLE)

    def _confirm(self, position: int, message: bytes) -> None:
        self._must_be_alive(position)
        found = Confirm.decode(message, self._sid)
        self._once(position, self._confirmed)
        keys.verify(self._devices[position].id, found.signature, "survivors", self._sid, self._digest)
        self._confirmed[position] = found.signature

    def _reveal(self, position: int, message: bytes) -> None:
        self._must_be_alive(position)
        shares = Unmask.decode(message, self._sid).shares
        self._once(position, self._revealed)
        kinds = {
            peer: SEED_SHARE if peer in self._alive else KEY_SHARE
            for peer in self._neighbours[position]
            if peer in self._shared
        }
        if {peer: kind for peer, (kind, _) in shares.items()} != kinds or any(s >= PRIME for _, s in shares.values()):
            raise BadShare(f"position {position} sent other shares than were due", [position])
        self._revealed[position] = {peer: share for peer, (_, share) in shares.items()}

    def _once(self, position: int, seen: Container[int]) -> None:
        if position in seen:
            raise DuplicateUpload(f"position {position} sent this before", [position])

    def _must_be_alive(self, position: int) -> None:
        if position not in self._alive:
            raise OutOfOrder(f"position {position} is not among the survivors")

    def _deliver(self) -> dict[int, bytes]:
        with self._closing(Phase.SHARING, Phase.UPLOADING):
            self._shared = frozenset(self._shares)
            self._check_enough(self._shared)
            boxes = {
                (sender, receiver): box
                for sender, shares in self._shares.items()
                for receiver, box in zip(self._neighbours[sender], shares.boxes, strict=True)
            }
            self._shares = {position: Shares(shares.commitment, ()) for position, shares in self._shares.items()}
            self._sum = np.zeros(packing.word_count(self._invite.segments), np.uint64)
            return {
                position: Deliver(
                    self._shared,
                    {peer: boxes[peer, position] for peer in self._neighbours[position] if peer in self._shared},
                ).encode(self._sid, self._parameters.n)
                for position in self._shared
            }

    def _survivors(self) -> dict[int, bytes]:
        with self._closing(Phase.UPLOADING, Phase.CONFIRMING if self._active else Phase.REVEALING):
            self._alive = frozenset(self._uploads)
            self._check_enough(self._alive)
            for position in self._shared:
                near = sum(peer in self._alive for peer in self._neighbours[position])
                needed = position in self._alive or near
                if needed and near < self._parameters.t:
                    raise BelowThreshold(
                        f"position {position} has {near} neighbours left, of {self._parameters.t} that must reveal",
                        [position],
                    )
            self._digest = survivors_digest(self._shared, self._alive, self._parameters.n)
            message = Survivors(self._alive).encode(self._sid, self._parameters.n)
            return dict.fromkeys(self._alive, message)

    def _confirmations(self) -> dict[int, bytes]:
        with self._closing(Phase.CONFIRMING, Phase.REVEALING):
            messages = {}
            for position in self._confirmed:
                peers = [peer for peer in self._neighbours[position] if peer in self._confirmed]
                signed = {peer: (self._digest, self._confirmed[peer]) for peer in peers[: self._parameters.t]}
                messages[position] = Confirmations(signed).encode(self._sid)
            return messages

    def _check_enough(self, positions: frozenset[int]) -> None:
        if len(positions) < self._invite.min_sum:
            raise BelowThreshold(f"{len(positions)} devices are left, and a sum must have {self._invite.min_sum}")
