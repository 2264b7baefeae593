"""Server: the server's end of a session, as a state machine. Spec: docs/spec/secagg.md §7.

    server = Server(invite, key, authority)
    server.invitation                       M0, for all devices
    server.receive(slot, M1)  …             a slot is the number by which the host knows a device
    roster = server.advance().roster        and now the authority draws the beacon, if there is a roster to draw for
    server.advance(beacon).messages         M2 by slot
    server.receive(slot, M3)  …
    server.advance().messages               M4 by slot
    server.receive(slot, M5)  …
    server.advance().messages               M6 by slot
    server.receive(slot, M7)  …
    server.advance().messages               M8 by slot
    server.receive(slot, M9)  …             not in mode honest
    server.advance().messages               M10 by slot; not in mode honest
    server.receive(slot, M11)  …
    work = server.advance().unmasking       all that is left to do: a value, for any process
    server.settle(work.run())
    server.results()                        M12 by slot, also after a failure

A cohort that is too large for one session is divided once it has advertised: `server.divide(groups)` gives a session of
its own for each group.

A message that `receive` refuses changes nothing, and the host may go on without that device. An error of any other step
ends the session. Memory is one vector and a little for each device, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secagg import errors, keys, packing, parameters, session
from secagg.encoding import DEVICE_MESSAGES, MessageType
from secagg.keys import EMPTY, NeighbourGraph, Tree, hash_of
from secagg.masking import Words
from secagg.messages import (
    ABORTED,
    ACTIVE,
    BEACON_BYTES,
    DONE,
    KEY_SHARE,
    NO_BEACON,
    SEED_SHARE,
    UNSIGNED,
    Advertise,
    Complaints,
    Confirm,
    Confirmations,
    Deliver,
    Included,
    Invite,
    Roster,
    RosterEntry,
    SessionResult,
    Shares,
    Survivors,
    Unmask,
    check_beacon,
    survivors_digest,
)
from secagg.parameters import GraphParameters, leave_out
from secagg.shamir import PRIME


class Server:
    """A session over one cohort. parameters: those of its roster, once advertising has ended."""

    def __init__(
        self,
        invite: Invite,
        key: Ed25519PrivateKey,
        authority: bytes | None,
        choose: Callable[[int], GraphParameters] = parameters.find,
    ) -> None:
        """`choose` gives the parameters for a roster's size. Raises HeadroomError."""
        packing.check_headroom(invite.segments, invite.n_max)
        self._invite, self._key, self._authority, self._choose = invite, key, authority, choose
        self._active = invite.mode == ACTIVE
        self._invite_hash = invite.hash
        self.invitation = invite.body() + self._sign("invite", keys.NO_CONTEXT, self._invite_hash)
        self.phase = session.SessionPhase.ADVERTISING
        self._advertised: dict[int, Advertise] = {}
        self._seen: set[bytes] = set()
        self._tree = Tree([b""])
        self._sum: session.UnmaskedSum | None = None
        # By position, from here on.
        self._slots: tuple[int, ...] = ()
        self._devices: tuple[Advertise, ...] = ()
        self._neighbours: list[list[int]] = []
        self._shares: dict[int, Shares] = {}
        self._accused: dict[int, frozenset[int]] = {}
        self._suspects: frozenset[int] = frozenset()
        self._masked = session.MaskedSum(session.no_words(0))
        self._confirmed: dict[int, bytes] = {}
        self._revealed: dict[int, dict[int, int]] = {}

    def receive(self, slot: int, message: bytes, device: bytes | None = None) -> None:
        """Handle a message of a device. A refusal, any SecaggError, changes nothing.

        device: the sender's id, if the host knows it: the credential must be that device's.
        """
        number = MessageType.of(message)
        if number not in DEVICE_MESSAGES:
            raise errors.Malformed(f"M{number} is not a message of devices")
        if number is not self.phase.due:
            raise errors.OutOfOrder(f"M{number} came while the server is in phase {self.phase.name.lower()}")
        if self.phase is session.SessionPhase.ADVERTISING:
            return self._take_advertisement(slot, message, device)
        if slot not in self._positions:
            raise errors.OutOfOrder(f"slot {slot} is not on the roster")
        take = {
            session.SessionPhase.SHARING: self._take_shares,
            session.SessionPhase.OPENING: self._take_complaints,
            session.SessionPhase.UPLOADING: self._take_upload,
            session.SessionPhase.CONFIRMING: self._take_confirmation,
            session.SessionPhase.REVEALING: self._take_revealed,
        }[self.phase]
        return take(self._positions[slot], message)

    def expected(self, slot: int) -> session.ExpectedVector:
        """What M7 of a device must be, for a host that adds vectors elsewhere. Raises OutOfOrder when none is due."""
        if self.phase is not session.SessionPhase.UPLOADING or self._positions.get(slot, -1) not in self._shared:
            raise errors.OutOfOrder(f"slot {slot} is not included, so its mask could not be removed")
        device = self._devices[position := self._positions[slot]]
        return session.ExpectedVector(self._sid, position, device.id if self._active else None, self._masked.words.size)

    def merge(self, signatures: Mapping[int, bytes], words: Words) -> None:
        """Take in a sum of vectors that were opened elsewhere, with the signatures in their M7 by slot.

        Raises OutOfOrder, DuplicateUpload or BadVector, and takes nothing.
        """
        self._masked.merge({self.expected(slot).position: one for slot, one in signatures.items()}, words)

    def divide(self, groups: Sequence[Iterable[int]]) -> list[Server]:
        """A session for each of several disjoint groups of the slots that advertised. This session is then over."""
        if self.phase is not session.SessionPhase.ADVERTISING:
            raise errors.OutOfOrder(f"a cohort is divided while it advertises, not in phase {self.phase.name.lower()}")
        self.phase = session.SessionPhase.OVER
        return [self._of(group) for group in groups]

    def _of(self, group: Iterable[int]) -> Server:
        server = Server(self._invite, self._key, self._authority, self._choose)
        server._advertised = {slot: self._advertised[slot] for slot in group}
        return server

    def advance(self, beacon: bytes = b"") -> session.PhaseEnd:
        """End the phase, without the missing devices.

        `beacon`, 64 bytes, is for the phase DRAWING, and only where advertising ended with a roster to draw for. Raises
        OutOfOrder for a beacon in another phase, or after the end; any other SecaggError ends the session.
        """
        ends = {
            session.SessionPhase.ADVERTISING: self._fix_roster,
            session.SessionPhase.DRAWING: lambda: self._open_roster(beacon),
            session.SessionPhase.SHARING: self._deliver,
            session.SessionPhase.OPENING: self._include,
            session.SessionPhase.UPLOADING: self._fix_survivors,
            session.SessionPhase.CONFIRMING: self._pass_confirmations,
            session.SessionPhase.REVEALING: self._unmask,
        }
        if self.phase not in ends:
            raise errors.OutOfOrder("the session is over: there is no phase to end")
        if beacon and self.phase is not session.SessionPhase.DRAWING:
            raise errors.OutOfOrder(
                f"a beacon came in phase {self.phase.name.lower()}: end advertising first, then draw it"
            )
        try:
            self.phase, end = ends[self.phase]()
        except BaseException:
            self.abort()
            raise
        return end

    def settle(self, unmasked: session.UnmaskedSum) -> None:
        """Accept the sum from `unmasking`. The results then contain its hash."""
        self._sum = unmasked

    def results(self) -> dict[int, bytes]:
        """M12 by slot for the whole roster, once the session is over; empty if there was no roster."""
        if self.phase is not session.SessionPhase.OVER:
            raise errors.OutOfOrder("the session goes on, so there is no result")
        if not self._neighbours:
            return {}
        status, digest = (DONE, self._sum.digest) if self._sum else (ABORTED, EMPTY)
        leaves = [self._masked.signatures.get(position, UNSIGNED) for position in range(len(self._slots))]
        unsigned = SessionResult(status, digest, Tree(leaves).root)
        signed = replace(unsigned, signature=self._sign("result", self._sid, unsigned.body()))
        return dict.fromkeys(self._slots, signed.encode(self._sid))

    @property
    def suspects(self) -> frozenset[int]:
        """The slots of the devices that were left out for complaints; at least half of them are corrupt."""
        return self.slots(self._suspects)

    def slots(self, positions: Iterable[int]) -> frozenset[int]:
        """The slots of devices by their positions in the roster, as errors and sums name them."""
        return frozenset(self._slots[position] for position in positions)

    def abort(self) -> None:
        """End the session without a sum, in any phase."""
        if self._sum is None:
            self.phase = session.SessionPhase.OVER
            self._forget()

    def _forget(self) -> None:
        """Forget the shares, which could unmask one device's vector, and the sum's words."""
        self._shares, self._revealed = {}, {}
        self._masked.forget()

    def _sign(self, what: str, context: bytes, body: bytes) -> bytes:
        return keys.sign(self._key, what, context, body) if self._active else UNSIGNED

    def _take_advertisement(self, slot: int, message: bytes, sender: bytes | None) -> None:
        device = Advertise.decode(message, self._invite_hash)
        if slot in self._advertised:
            raise errors.DuplicateUpload(f"slot {slot} advertised before")
        own = set(session.names_of(device))
        session.check_distinct([device])
        if own & self._seen:
            raise errors.DuplicateKey(
                f"slot {slot} sent an id or key that another device has, or is one that advertised"
            )
        for point in (device.mask_key, device.box_key):
            keys.check_point(point)
        if self._active:
            session.check_advertisement(device, self._invite_hash, self._authority, self._invite.deadline)
        if self._active and self._authority is not None and sender not in (None, device.device):
            raise errors.BadSignature(f"slot {slot} sent the credential of another device")
        self._seen |= own
        self._advertised[slot] = device

    def _take_shares(self, position: int, message: bytes) -> None:
        shares = Shares.decode(message, self._sid, self.parameters.k)
        self._once(position, self._shares)
        self._shares[position] = shares

    def _take_complaints(self, position: int, message: bytes) -> None:
        if position not in self._shares:
            raise errors.OutOfOrder(f"position {position} shared no secrets, so it was sent no boxes")
        accused = Complaints.decode(message, self._sid, self.parameters.n).devices
        if not accused <= self._shares.keys() & set(self._neighbours[position]):
            raise errors.Malformed(f"position {position} complains about devices whose boxes it was not sent")
        self._once(position, self._accused)
        self._accused[position] = accused

    def _take_upload(self, position: int, message: bytes) -> None:
        self._masked.add(position, self.expected(self._slots[position]).open(message))

    def _take_confirmation(self, position: int, message: bytes) -> None:
        self._must_be_alive(position)
        confirmation = Confirm.decode(message, self._sid)
        self._once(position, self._confirmed)
        keys.verify(self._devices[position].id, confirmation.signature, "survivors", self._sid, self._digest)
        self._confirmed[position] = confirmation.signature

    def _take_revealed(self, position: int, message: bytes) -> None:
        self._must_be_alive(position)
        shares = Unmask.decode(message, self._sid).shares
        self._once(position, self._revealed)
        kinds = {
            peer: SEED_SHARE if peer in self._alive else KEY_SHARE
            for peer in self._neighbours[position]
            if peer in self._shared
        }
        if {peer: kind for peer, (kind, _) in shares.items()} != kinds or any(s >= PRIME for _, s in shares.values()):
            raise errors.BadShare(f"position {position} sent other shares than were due", [position])
        self._revealed[position] = {peer: share for peer, (_, share) in shares.items()}

    def _once(self, position: int, seen: Container[int]) -> None:
        if position in seen:
            raise errors.DuplicateUpload(f"position {position} sent this before", [position])

    def _must_be_alive(self, position: int) -> None:
        if position not in self._alive:
            raise errors.OutOfOrder(f"position {position} is not among the survivors")

    def _fix_roster(self) -> tuple[session.SessionPhase, session.PhaseEnd]:
        """The end of advertising: the roster, for which the beacon is then drawn."""
        n = len(self._advertised)
        if n > self._invite.n_max:
            raise errors.OutOfOrder(
                f"{n} devices advertised, and a roster holds {self._invite.n_max}: divide them first"
            )
        if n < self._invite.min_sum:
            raise errors.BelowThreshold(f"{n} devices advertised, and a sum must have {self._invite.min_sum}")
        try:
            self.parameters = self._choose(n)
        except errors.PolicyViolation as error:  # no device would take part in so small a cohort
            raise errors.BelowThreshold(str(error)) from error
        self._slots = tuple(sorted(self._advertised))
        self._positions = {slot: position for position, slot in enumerate(self._slots)}
        self._devices = tuple(self._advertised[slot] for slot in self._slots)
        self._tree = Tree([device.leaf for device in self._devices])
        leaves = () if self.parameters.complete else tuple(hash_of(device.leaf) for device in self._devices)
        return session.SessionPhase.DRAWING, session.PhaseEnd(roster=leaves)

    def _open_roster(self, beacon: bytes) -> tuple[session.SessionPhase, session.PhaseEnd]:
        """M2. Raises Malformed for a beacon of another length; BadSignature or GraphMismatch as devices do."""
        chosen, root, n = self.parameters, self._tree.root, self.parameters.n
        beacon = beacon or (NO_BEACON if chosen.complete else b"")
        if len(beacon) != BEACON_BYTES:
            raise errors.Malformed(f"a beacon has {BEACON_BYTES} bytes, not {len(beacon)}")
        if self._active:
            check_beacon(self._authority, beacon, self._invite_hash, chosen, root)
        self._sid = session.session_id(self._invite_hash, chosen, root, beacon)
        graph = NeighbourGraph(chosen, root, beacon)
        self._neighbours = [graph.neighbours(position) for position in range(n)]
        paths = [self._tree.path(position) for position in range(n)]
        entries = [RosterEntry(position, self._devices[position], paths[position]) for position in range(n)]
        messages = {
            position: Roster(
                n, chosen.k, chosen.t, root, beacon, position, paths[position],
                tuple(entries[peer] for peer in self._neighbours[position]),
            ).encode(self._invite_hash)
            for position in range(n)
        }  # fmt: skip
        return session.SessionPhase.SHARING, self._by_slot(messages)

    def _deliver(self) -> tuple[session.SessionPhase, session.PhaseEnd]:
        """M4."""
        shared = frozenset(self._shares)
        self._check_enough(shared)
        boxes = {
            (sender, receiver): box
            for sender, shares in self._shares.items()
            for receiver, box in zip(self._neighbours[sender], shares.boxes, strict=True)
        }
        self._shares = {position: Shares(shares.commitment, ()) for position, shares in self._shares.items()}
        messages = {
            position: Deliver(
                shared, {peer: boxes[peer, position] for peer in self._neighbours[position] if peer in shared}
            ).encode(self._sid, self.parameters.n)
            for position in self._going_on(shared)
        }
        return session.SessionPhase.OPENING, self._by_slot(messages)

    def _include(self) -> tuple[session.SessionPhase, session.PhaseEnd]:
        """M6."""
        opened = frozenset(self._accused)
        among = {position: accused & opened for position, accused in self._accused.items()}
        self._suspects = leave_out(among, self.parameters)
        self._shared = self._going_on(opened - self._suspects)
        self._masked = session.MaskedSum(session.no_words(packing.word_count(self._invite.segments)))
        message = Included(self._shared).encode(self._sid, self.parameters.n)
        return session.SessionPhase.UPLOADING, self._by_slot(dict.fromkeys(self._shared, message))

    def _fix_survivors(self) -> tuple[session.SessionPhase, session.PhaseEnd]:
        """M8."""
        self._alive = frozenset(self._masked.signatures)
        self._check_enough(self._alive)
        self._check_recoverable(self._alive)
        self._digest = survivors_digest(self._shared, self._alive, self.parameters.n)
        message = Survivors(self._alive).encode(self._sid, self.parameters.n)
        then = session.SessionPhase.CONFIRMING if self._active else session.SessionPhase.REVEALING
        return then, self._by_slot(dict.fromkeys(self._alive, message))

    def _pass_confirmations(self) -> tuple[session.SessionPhase, session.PhaseEnd]:
        """M10."""
        messages, going = {}, self._with_neighbours(frozenset(self._confirmed))
        self._check_recoverable(going)
        for position in going:
            peers = [peer for peer in self._neighbours[position] if peer in self._confirmed]
            signed = {peer: (self._digest, self._confirmed[peer]) for peer in peers[: self.parameters.t]}
            messages[position] = Confirmations(signed).encode(self._sid)
        return session.SessionPhase.REVEALING, self._by_slot(messages)

    def _unmask(self) -> tuple[session.SessionPhase, session.PhaseEnd]:
        """The remaining work. The session keeps none of it."""
        commitments = {position: shares.commitment for position, shares in self._shares.items()}
        revealed = session.RevealedShares(
            self._sid, self.parameters, self._devices, self._neighbours, self._shared, self._alive,
            commitments, self._revealed,
        )  # fmt: skip
        work = session.Unmasking(revealed, self._masked.words, self._invite.segments, self._invite.w_max)
        self._forget()
        return session.SessionPhase.OVER, session.PhaseEnd(unmasking=work)

    def _by_slot(self, messages: Mapping[int, bytes]) -> session.PhaseEnd:
        return session.PhaseEnd({self._slots[position]: message for position, message in messages.items()})

    def _with_neighbours(self, positions: frozenset[int]) -> frozenset[int]:
        """Those that have t neighbours among them: any other device refuses what comes next."""
        near = {position: sum(peer in positions for peer in self._neighbours[position]) for position in positions}
        return frozenset(position for position, count in near.items() if count >= self.parameters.t)

    def _going_on(self, positions: frozenset[int]) -> frozenset[int]:
        """Without those that have not t neighbours among the rest. Raises BelowThreshold where that is too few."""
        while (rest := self._with_neighbours(positions)) != positions:
            positions = rest
        self._check_enough(positions)
        return positions

    def _check_recoverable(self, revealing: frozenset[int]) -> None:
        """Raise BelowThreshold where a secret that the sum needs has fewer than t neighbours that can reveal it."""
        for position in self._shared:
            needed = position in self._alive or not self._alive.isdisjoint(self._neighbours[position])
            near = sum(peer in revealing for peer in self._neighbours[position])
            if needed and near < self.parameters.t:
                raise errors.BelowThreshold(
                    f"position {position} has {near} neighbours left, of {self.parameters.t} that must reveal",
                    [position],
                )

    def _check_enough(self, positions: frozenset[int]) -> None:
        if len(positions) < self._invite.min_sum:
            raise errors.BelowThreshold(
                f"{len(positions)} devices are left, and a sum must have {self._invite.min_sum}"
            )
