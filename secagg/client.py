"""Client: the device's end of a session, as a state machine. Spec: docs/spec/secagg.md §6.

    client = Client(identity, policy, SessionInput(vector, weight, model_hash, layout_hash, credential, last_round))
    reply = client.receive(message)

`receive` takes every message of the server, in the order M0, M2, M4, M6, M8, M10, M12 (without M10 in mode honest), and
gives the message to send next. For that the host owes the session two things:

* `reply.keep`, if there is one, is durable before `reply.message` leaves.
* The round is noted, durably, before M1 leaves: `last_round` of every later session of the task is at least this round.

`receive` may raise any SecaggError. The session is then over for this device, and its secrets are forgotten. Python can
only let go of secrets, not overwrite them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from secagg import errors, keys, messages, packing
from secagg.client_state import AggregationPolicy, ClientStage, ClientState, Peer
from secagg.encoding import MessageType
from secagg.keys import KEY_BYTES, NO_CREDENTIAL, NeighbourGraph, PairKey, climb, sha256
from secagg.masking import LITTLE, add_masks
from secagg.parameters import GraphParameters
from secagg.session import check_advertisement, check_distinct, commitment, pair_mask, self_mask, session_id
from secagg.shamir import PRIME, split


@dataclass(frozen=True, slots=True)
class SessionInput:
    """The input of a device to a session, which is also the session's first state.

    vector: float32 (D,). weight: an integer, 0 … w_max. model_hash, layout_hash: of the model and the
    layout that the device holds, 32 bytes each. credential: the device's own, as `secagg.keys` has it.
    last_round: the greatest round of the task for which the device ever answered. now: the device's time, in seconds
    since 1970; its peers' credentials must be valid then. 0 if its clock cannot be trusted.
    """

    vector: NDArray[np.float32]
    weight: int
    model_hash: bytes
    layout_hash: bytes
    credential: bytes = NO_CREDENTIAL
    last_round: int = -1
    now: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a message.

    message: the bytes to send next; None when the session is over. keep: the state that must be durable before
    `message` is sent, replacing the one kept before; None when there is no new state to keep. It holds secrets of other
    devices: protect it like a key. done: whether the device's part is over.
    """

    message: bytes | None = None
    keep: bytes | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class _Advertised:
    """The state between M1 and M2."""

    session_input: SessionInput
    invite: messages.Invite
    mask_key: PairKey
    box_key: PairKey
    device: messages.Advertise


@dataclass(frozen=True, slots=True)
class _Shared:
    """The state between M3 and M4."""

    session_input: SessionInput
    invite: messages.Invite
    roster: messages.Roster
    sid: bytes
    seed: int
    mask_secrets: Mapping[int, bytes]
    box_secrets: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class _Opened:
    """The state between M5 and M6. delivered: U0. peers: the neighbours in it whose boxes opened, with their shares."""

    before: _Shared
    delivered: frozenset[int]
    peers: tuple[Peer, ...]
    accused: frozenset[int]


_State: TypeAlias = SessionInput | _Advertised | _Shared | _Opened | ClientState
_Step: TypeAlias = tuple[_State | None, Reply]
"""The state after a message, None when the session is over, and the reply."""


class Client:
    """A device in one session."""

    def __init__(
        self, identity: Ed25519PrivateKey, policy: AggregationPolicy, state: SessionInput | ClientState
    ) -> None:
        """`state` is the device's input at the start of a session; to continue a session use `restore`."""
        self._identity = identity
        self._policy = policy
        self._state: _State | None = state
        self._result: messages.SessionResult | None = None

    @classmethod
    def restore(cls, identity: Ed25519PrivateKey, policy: AggregationPolicy, keep: bytes) -> Client:
        """The client of a restarted device, from the last `Reply.keep`. Raises Malformed."""
        return cls(identity, policy, ClientState.decode(keep))

    @property
    def result(self) -> messages.SessionResult:
        """The server's signed result of the session. Raises OutOfOrder before M12 was received."""
        if self._result is None:
            raise errors.OutOfOrder("the session has no result: M12 has not come")
        return self._result

    def receive(self, message: bytes) -> Reply:
        """Handle a message of the server. Any SecaggError ends the session and forgets its secrets."""
        state, self._state = self._state, None  # so that an error leaves nothing
        self._state, reply = self._step(state, message)
        return reply

    def _step(self, state: _State | None, message: bytes) -> _Step:  # noqa: PLR0911 - one return per message
        if state is None:
            raise errors.OutOfOrder("the session is over: this device answers nothing more")
        number = MessageType.of(message)
        match state, number:
            case SessionInput() as session_input, MessageType.INVITE:
                return self._advertise(session_input, message)
            case _Advertised() as advertised, MessageType.ROSTER:
                return self._share(advertised, message)
            case _Shared() as shared, MessageType.DELIVER:
                return _open_boxes(shared, message)
            case _Opened() as opened, MessageType.INCLUDED:
                return self._mask(opened, message)
            case ClientState() as masked, MessageType.SURVIVORS:
                return self._confirm(masked, message)
            case ClientState() as masked, MessageType.CONFIRMATIONS:
                return self._check_and_reveal(masked, message)
            case ClientState() as masked, MessageType.RESULT:
                return self._finish(masked, message)
        raise errors.OutOfOrder(f"M{number} is not due: a device answers in order, and once")

    def _advertise(self, session_input: SessionInput, message: bytes) -> _Step:
        """M0 to M1."""
        invite = self._policy.accept(
            message, (session_input.model_hash, session_input.layout_hash), session_input.last_round
        )
        mask_key, box_key = (PairKey(secrets.token_bytes(KEY_BYTES)) for _ in range(2))
        own = self._identity.public_key().public_bytes_raw()
        signature = self._sign(invite, "advertise", invite.hash, mask_key.public + box_key.public)
        device = messages.Advertise(own, mask_key.public, box_key.public, signature, session_input.credential)
        return _Advertised(session_input, invite, mask_key, box_key, device), Reply(device.encode(invite.hash))

    def _share(self, state: _Advertised, message: bytes) -> _Step:
        """M2 to M3."""
        roster = messages.Roster.decode(message, state.invite.hash, state.invite.n_max)
        self._check_roster(state, roster)
        sid = session_id(state.invite.hash, GraphParameters(roster.n, roster.k, roster.t), roster.root, roster.beacon)
        mask_secrets = {peer.position: state.mask_key.agree(peer.device.mask_key) for peer in roster.neighbours}
        box_secrets = {peer.position: state.box_key.agree(peer.device.box_key) for peer in roster.neighbours}
        seed = secrets.randbelow(PRIME)
        own = roster.position
        shares = zip(split(seed, roster.k, roster.t), split(state.mask_key.secret, roster.k, roster.t), strict=True)
        boxes = tuple(
            keys.seal(keys.derive(secret, sid, "box", own, peer), _join(pair), sid, own, peer)
            for (peer, secret), pair in zip(box_secrets.items(), shares, strict=True)
        )
        after = _Shared(state.session_input, state.invite, roster, sid, seed, mask_secrets, box_secrets)
        return after, Reply(messages.Shares(commitment(sid, own, seed), boxes).encode(sid))

    def _mask(self, opened: _Opened, message: bytes) -> _Step:
        """M6 to M7. Afterwards the device no longer has its own secrets."""
        state, client_state = opened.before, _included(opened, message)
        invite, sid, own = state.invite, state.sid, state.roster.position
        words = packing.encode(invite.segments, state.session_input.vector, state.session_input.weight, invite.w_max)
        pairs = (pair_mask(sid, own, peer.position, state.mask_secrets[peer.position]) for peer in client_state.peers)
        add_masks(words, [self_mask(sid, own, state.seed), *pairs])
        data = words.astype(LITTLE, copy=False).tobytes()
        signature = self._sign(invite, "masked", sid, sha256(data) if invite.mode == messages.ACTIVE else b"")
        return client_state, Reply(messages.Masked(data, signature).encode(sid), client_state.encode())

    def _confirm(self, state: ClientState, message: bytes) -> _Step:
        """M8 to M9, or to M11 in mode honest. The same M8 again gets the same answer, another M8 gets none."""
        alive = messages.Survivors.decode(message, state.sid, state.n).devices
        if state.stage is not ClientStage.MASKED and alive != state.alive:
            raise _second_view(state)
        _check_survivors(state, alive)
        settled = state.confirm(alive) if state.stage is ClientStage.MASKED else state
        if state.mode != messages.ACTIVE:
            return _reveal(settled)
        signature = keys.sign(self._identity, "survivors", settled.sid, settled.digest)
        return settled, Reply(messages.Confirm(signature).encode(settled.sid), settled.encode())

    def _check_and_reveal(self, state: ClientState, message: bytes) -> _Step:
        """M10 to M11: one share of every neighbour."""
        if state.stage is ClientStage.MASKED or state.mode != messages.ACTIVE:
            raise errors.OutOfOrder("confirmations came before survivors were settled, or in mode honest")
        self._check_confirmations(state, messages.Confirmations.decode(message, state.sid))
        return _reveal(state)

    def _finish(self, state: ClientState, message: bytes) -> _Step:
        """M12. The client forgets its state, and the host can delete the kept one."""
        result = messages.SessionResult.decode(message, state.sid)
        if state.mode == messages.ACTIVE:
            keys.verify(self._policy.server_key, result.signature, "result", state.sid, result.body())
        self._result = result
        return None, Reply(done=True)

    def _sign(self, invite: messages.Invite, what: str, context: bytes, body: bytes) -> bytes:
        return keys.sign(self._identity, what, context, body) if invite.mode == messages.ACTIVE else messages.UNSIGNED

    def _check_roster(self, state: _Advertised, roster: messages.Roster) -> None:
        chosen = GraphParameters(roster.n, roster.k, roster.t)
        self._policy.check_parameters(chosen)
        if roster.n < state.invite.min_sum:
            raise errors.BelowThreshold(
                f"the roster has {roster.n} devices, and a sum must have {state.invite.min_sum}"
            )
        if climb(state.device.leaf, roster.position, roster.path) != roster.root:
            raise errors.SelfMismatch("the roster does not hold this device with the keys that it sent")
        if state.invite.mode == messages.ACTIVE:
            messages.check_beacon(self._policy.authority, roster.beacon, state.invite.hash, chosen, roster.root)
        if NeighbourGraph(chosen, roster.root, roster.beacon).neighbours(roster.position) != [
            peer.position for peer in roster.neighbours
        ]:
            raise errors.GraphMismatch("the neighbours are not those that roster and beacon imply")
        for peer in roster.neighbours:
            if climb(peer.device.leaf, peer.position, peer.path) != roster.root:
                raise errors.GraphMismatch(
                    f"position {peer.position} is not what the roster holds there", [peer.position]
                )
        check_distinct([state.device, *(peer.device for peer in roster.neighbours)])
        if state.invite.mode == messages.ACTIVE:
            invite_hash, until = state.invite.hash, max(state.session_input.now, state.invite.deadline)
            for peer in roster.neighbours:
                check_advertisement(peer.device, invite_hash, self._policy.authority, until)

    def _check_confirmations(self, state: ClientState, confirmations: messages.Confirmations) -> None:
        peers, own_digest = state.alive_peers, state.digest
        if len(confirmations.signed) < state.t:
            raise errors.BelowThreshold(
                f"{len(confirmations.signed)} neighbours confirmed the survivors, and {state.t} must"
            )
        for position, (digest, signature) in confirmations.signed.items():
            if position not in peers:
                raise errors.BadSignature(
                    f"position {position} confirmed, but is no neighbour that survived", [position]
                )
            keys.verify(peers[position], signature, "survivors", state.sid, digest)
            if digest != own_digest:
                own = keys.sign(self._identity, "survivors", state.sid, own_digest)
                raise errors.InconsistentSurvivors(
                    f"position {position} signed another survivor set: the server shows several",
                    [position],
                    [(own_digest, own), (digest, signature)],
                )


def _open_boxes(state: _Shared, message: bytes) -> _Step:
    """M4 to M5: the shares of every neighbour whose box opens, and complaints about the others."""
    roster = state.roster
    delivery = messages.Deliver.decode(message, state.sid, roster.n, [peer.position for peer in roster.neighbours])
    _check_shared(state, delivery.shared, delivery.boxes)
    peers, accused = [], set()
    for entry in roster.neighbours:
        if entry.position in delivery.boxes:
            try:
                peers.append(_open(state, entry, delivery.boxes[entry.position]))
            except errors.BadCiphertext:
                accused.add(entry.position)
    opened = _Opened(state, delivery.shared, tuple(peers), frozenset(accused))
    return opened, Reply(messages.Complaints(opened.accused).encode(state.sid, roster.n))


def _included(opened: _Opened, message: bytes) -> ClientState:
    """The state to keep after M6: the shares of every neighbour that stays in the session."""
    state, roster = opened.before, opened.before.roster
    shared = messages.Included.decode(message, state.sid, roster.n).devices
    if not shared <= opened.delivered:
        raise errors.InconsistentSurvivors("devices are included that never shared", shared - opened.delivered)
    if shared & opened.accused:
        raise errors.BadCiphertext("devices are included whose boxes did not open", shared & opened.accused)
    peers = tuple(peer for peer in opened.peers if peer.position in shared)
    _check_shared(state, shared, peers)
    return ClientState(
        sid=state.sid, mode=state.invite.mode, n=roster.n, t=roster.t, min_sum=state.invite.min_sum,
        position=roster.position, shared=shared, peers=peers,
    )  # fmt: skip


def _check_shared(state: _Shared, shared: frozenset[int], neighbours: Sized) -> None:
    if state.roster.position not in shared:
        raise errors.SelfMarkedDead(f"position {state.roster.position} sent its shares, but is listed as gone")
    if len(neighbours) < state.roster.t:
        raise errors.TooFewNeighbours(f"{len(neighbours)} neighbours are left, and {state.roster.t} must be")
    if len(shared) < state.invite.min_sum:
        raise errors.BelowThreshold(f"{len(shared)} devices shared, and {state.invite.min_sum} must")


def _open(state: _Shared, peer: messages.RosterEntry, box: bytes) -> Peer:
    """A neighbour's two shares. Raises BadCiphertext."""
    sender, receiver = peer.position, state.roster.position
    key = keys.derive(state.box_secrets[sender], state.sid, "box", sender, receiver)
    pair = keys.open_box(key, box, state.sid, sender, receiver)
    seed_share, key_share = (
        int.from_bytes(part, "little") for part in (pair[: messages.SHARE_BYTES], pair[messages.SHARE_BYTES :])
    )
    if seed_share >= PRIME or key_share >= PRIME:
        raise errors.BadCiphertext(f"the box from position {sender} holds no shares", [sender])
    return Peer(sender, peer.device.id, seed_share, key_share)


def _check_survivors(state: ClientState, alive: frozenset[int]) -> None:
    if state.position not in alive:
        raise errors.SelfMarkedDead(f"position {state.position} sent its vector, but is listed as gone")
    if not alive <= state.shared:
        raise errors.InconsistentSurvivors("devices are said to have survived that never shared", alive - state.shared)
    near = sum(peer.position in alive for peer in state.peers)
    if len(alive) < state.min_sum or near < state.t:
        raise errors.BelowThreshold(
            f"{len(alive)} devices survived, {near} of them neighbours; at least {state.min_sum} and {state.t} must"
        )


def _second_view(state: ClientState) -> errors.AlreadyRevealed | errors.InconsistentSurvivors:
    if state.stage is ClientStage.REVEALED:
        return errors.AlreadyRevealed("this device revealed its shares for another survivor set, and reveals no others")
    return errors.InconsistentSurvivors(
        "this device was shown another survivor set before, and signs one", [state.position]
    )


def _reveal(state: ClientState) -> _Step:
    revealed = state.reveal()
    return revealed, Reply(revealed.unmask(), revealed.encode())


def _join(shares: tuple[int, int]) -> bytes:
    return b"".join(share.to_bytes(messages.SHARE_BYTES, "little") for share in shares)
