"""The cost of secure aggregation: the work of one device and of the server in a session of n devices, on one thread.

The device is a real `Client` and runs every step from M0 to M11. Around it are only as many real devices as its session
needs: everybody's M1, and the shares and confirmations of its own neighbours. Making those is not measured.

The server's time is what happens once the last share is in, as in `Unmasking.run`: reconstruct secrets, derive keys,
take all masks off the sum, check it, decode it. Its inputs are made here, from secrets drawn here, for a cohort of
which a part dropped out after it shared; tests check that the sum is right. `receive_ms` is the cost of an upload on
arrival: its hash, its signature, and its addition to the sum.

Times are CPU times, the least of several runs. `ctr_fraction` is how fast masks are added, as a part of how fast
OpenSSL only makes AES-256-CTR keystream, in the same process.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from benchmarks.runner import SecaggOptions
from benchmarks.usage import in_turns, least_cpu_s
from fedcore.params import Float32
from muster.output import Say
from secagg import keys, messages, packing, parameters
from secagg.client import Client, SessionInput
from secagg.client_state import AggregationPolicy
from secagg.keys import DEVICE_BYTES, NO_CREDENTIAL, NeighbourGraph, PairKey, issue, root_of, sha256
from secagg.masking import LITTLE, Mask, Words, add_masks
from secagg.packing import PackedSegment
from secagg.parameters import GraphParameters
from secagg.server import Server
from secagg.session import RevealedShares, Unmasking, commitment
from secagg.shamir import PRIME, split

FIELD_BITS = 21
NEVER = 1 << 40
"""A time, in seconds since 1970, at which credentials of a benchmark end."""
HASH = bytes(32)
RAW_CHUNKS = (1 << 16, 1 << 20)
# Bounds of the figures, for vectors of 10^6 values when a tenth of the devices drops out.
TARGETS: dict[int, dict[str, float]] = {
    100: {"client_ms": 30.0, "server_s": 0.25, "bytes_up": 2.68e6, "ctr_fraction": 0.70},
    1000: {"client_ms": 80.0, "server_s": 7.0, "ctr_fraction": 0.70},
}


class Workload(msgspec.Struct, frozen=True):
    """A session to measure: n devices, D values each, and the share of devices that drops out after M3."""

    n: int
    dim: int
    dropout: float
    signed: bool

    @property
    def segment(self) -> PackedSegment:
        """Fields of 21 bits, with as many bits of precision as n summands leave."""
        in_bits = FIELD_BITS - self.n.bit_length()
        return PackedSegment(self.dim, FIELD_BITS, in_bits, -0.1, 0.1, norm=10.0, weighted=True)

    @property
    def alive(self) -> frozenset[int]:
        """The devices that upload: position 0, which is measured, and the first of the others."""
        return frozenset(range(self.n - round(self.n * self.dropout)))

    def invite(self) -> messages.Invite:
        """The invitation of the session."""
        mode = messages.ACTIVE if self.signed else messages.HONEST
        return messages.Invite(mode, HASH, 1, 0, self.n, 2, 1000, HASH, HASH, (self.segment,))


def run(options: SecaggOptions, say: Say) -> dict[str, Any]:
    """The costs of one session, for a device and for the server.

    `targets` are the most that the figures of their names may be; of `ctr_fraction`, the least. Raises PolicyViolation
    for a cohort that is too small, HeadroomError for one that is too large.
    """
    workload = Workload(options.n, options.dim, options.dropout, not options.honest)
    chosen, repeats = parameters.find(workload.n), options.repeats
    client_s, sizes = math.inf, (0, 0)
    for number in range(repeats):
        say(f"device, run {number + 1} of {repeats}")
        device = DeviceSession.of(workload)
        client_s, sizes = min(client_s, device.seconds), device.sizes
    say("server")
    server_s = _server(workload, chosen, repeats)
    say("kernel")
    fraction, rate = _kernel(packing.word_count((workload.segment,)))
    return {
        "mode": "active" if workload.signed else "honest",
        "n": workload.n,
        "k": chosen.k,
        "t": chosen.t,
        "dim": workload.dim,
        "dropout": workload.dropout,
        "client_ms": 1e3 * client_s,
        "server_s": server_s,
        "receive_ms": 1e3 * _receive(workload),
        "bytes_up": sizes[0],
        "bytes_down": sizes[1],
        "ctr_fraction": fraction,
        "mask_gb_s": rate,
        "targets": TARGETS.get(workload.n, {}) if (workload.dim, workload.dropout) == (10**6, 0.1) else {},
    }


class DeviceSession:
    """A device's part in a session, recorded: the CPU seconds of its steps, and what it received, sent and drew.

    facts: its keys, as bytes by name. vector: what it reports, (D,), with a weight.
    """

    weight = 10

    def __init__(self, device: Client, vector_D: Float32, **facts: bytes) -> None:
        self._device, self.vector, self.facts = device, vector_D, facts
        self.seconds, self.received, self.sent, self.drawn = 0.0, list[bytes](), list[bytes](), list[bytes]()

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes up and down, the server's last message among them."""
        last = messages.SessionResult(messages.DONE, HASH, HASH).encode(HASH)
        return sum(map(len, self.sent)), sum(map(len, self.received)) + len(last)

    def step(self, message: bytes) -> bytes:
        """The device's answer to a message."""
        with (
            patch.object(secrets, "token_bytes", partial(self._draw, secrets.token_bytes)),
            patch.object(secrets, "randbelow", partial(self._draw, secrets.randbelow)),
        ):
            started = time.process_time()
            answer = _answer(self._device, message)
            self.seconds += time.process_time() - started
        self.received.append(message)
        self.sent.append(answer)
        return answer

    def _draw(self, draw: Callable[[int], Any], bound: int) -> Any:
        drawn = draw(bound)
        self.drawn.append(drawn if isinstance(drawn, bytes) else drawn.to_bytes(32, "little"))
        return drawn

    @classmethod
    def of(cls, workload: Workload) -> DeviceSession:
        """The part of the device at position 0 in a session."""
        server_key, authority = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        identities = [Ed25519PrivateKey.generate() for _ in range(workload.n)]
        invite = workload.invite()
        parties = {
            name: key.public_key().public_bytes_raw()
            for name, key in (("server", server_key), ("authority", authority))
        }
        server = Server(invite, server_key, parties["authority"])
        policy = AggregationPolicy(parties["server"], parties["authority"], 2, True)
        vector_D = np.random.default_rng(0).normal(0, 0.01, workload.dim).astype(np.float32)
        ids = [identity.public_key().public_bytes_raw() for identity in identities]
        credentials = [issue(authority, id_, id_[:DEVICE_BYTES], NEVER) for id_ in ids]
        clients = [
            Client(identity, policy, SessionInput(vector_D, cls.weight, HASH, HASH, credential))
            for identity, credential in zip(identities, credentials, strict=True)
        ]
        facts = {"identity": identities[0].private_bytes_raw(), "credential": credentials[0]}
        watch = cls(clients[0], vector_D, **parties, **facts)

        server.receive(0, watch.step(server.invitation))
        for slot, client in enumerate(clients[1:], 1):
            server.receive(slot, _answer(client, server.invitation))
        roster = server.advance().roster
        chosen = server.parameters
        beacon = messages.draw_beacon(authority, invite.hash, chosen, root_of(roster)) if roster else b""
        rosters = server.advance(beacon).messages
        shared = watch.step(rosters[0])

        sid, n = shared[2:34], workload.n
        near = [entry.position for entry in messages.Roster.decode(rosters[0], invite.hash, n).neighbours]
        everyone = frozenset(range(n))
        boxes = {position: _box_for_0(clients[position], rosters[position], sid, invite) for position in near}
        watch.step(messages.Deliver(everyone, boxes).encode(sid, n))
        watch.step(messages.Included(everyone).encode(sid, n))
        watch.step(messages.Survivors(workload.alive).encode(sid, n))
        if workload.signed:
            digest = messages.survivors_digest(everyone, workload.alive, n)
            signers = [position for position in near if position in workload.alive][: parameters.find(n).t]
            signed = {i: (digest, keys.sign(identities[i], "survivors", sid, digest)) for i in signers}
            watch.step(messages.Confirmations(signed).encode(sid))
        return watch


def _answer(client: Client, message: bytes) -> bytes:
    """A device's answer; there is one to every message but M12."""
    return client.receive(message).message or b""


def _box_for_0(client: Client, roster: bytes, sid: bytes, invite: messages.Invite) -> bytes:
    decoded = messages.Roster.decode(roster, invite.hash, invite.n_max)
    rank = [entry.position for entry in decoded.neighbours].index(0)
    return messages.Shares.decode(_answer(client, roster), sid, decoded.k).boxes[rank]


def _server(workload: Workload, chosen: GraphParameters, repeats: int) -> float:
    """CPU seconds from the last share to the decoded sum."""
    revealed, total = _last_share_is_in(workload, chosen)
    return least_cpu_s(Unmasking(revealed, total, (workload.segment,), 1000).run, repeats)


def _last_share_is_in(workload: Workload, chosen: GraphParameters) -> tuple[RevealedShares, Words]:
    """The state of a server with every share: shares of all secrets, and a sum under the masks that they remove."""
    n, alive, sid = workload.n, workload.alive, secrets.token_bytes(32)
    graph = NeighbourGraph(chosen, HASH, messages.NO_BEACON)
    near = [graph.neighbours(position) for position in range(n)]
    pairs = [PairKey(secrets.token_bytes(32)) for _ in range(n)]
    seeds = [secrets.randbelow(PRIME) for _ in range(n)]
    shares: dict[int, dict[int, int]] = {position: {} for position in alive}
    for owner in range(n):
        points = split(seeds[owner] if owner in alive else pairs[owner].secret, chosen.k, chosen.t)
        for peer, point in zip(near[owner], points, strict=True):
            if peer in alive:
                shares[peer][owner] = point
    devices = [messages.Advertise(HASH, pair.public, HASH, messages.UNSIGNED, NO_CREDENTIAL) for pair in pairs]
    commitments = {position: commitment(sid, position, seeds[position]) for position in range(n)}
    revealed = RevealedShares(sid, chosen, devices, near, frozenset(range(n)), alive, commitments, shares)
    total = packing.encode((workload.segment,), np.zeros(workload.dim, np.float32), 10, 1000)
    total *= np.uint64(len(alive))
    masks, _ = revealed.masks()
    add_masks(total, [Mask(mask.key, -mask.sign) for mask in masks])
    return revealed, total


def _receive(workload: Workload) -> float:
    """CPU seconds to take in one upload."""
    identity, sid = Ed25519PrivateKey.generate(), HASH
    words = np.zeros(packing.word_count((workload.segment,)), LITTLE)
    data, signer = words.tobytes(), identity.public_key().public_bytes_raw()
    message = messages.Masked(data, keys.sign(identity, "masked", sid, sha256(data))).encode(sid)

    def take() -> None:
        upload = messages.Masked.decode(message, sid, words.size)
        if workload.signed:
            keys.verify(signer, upload.signature, "masked", sid, sha256(upload.words))
        np.add(words, np.frombuffer(upload.words, LITTLE), out=words)

    return least_cpu_s(take, 10)


def _kernel(size: int) -> tuple[float, float]:
    """How fast 32 masks are added to `size` words: as a part of OpenSSL's raw speed, and in 10^9 bytes a second."""
    words = np.zeros(size, np.uint64)
    masks = [Mask(secrets.token_bytes(32), 1 if i % 2 else -1) for i in range(32)]
    raws = {str(chunk): partial(_keystream, len(masks) * words.nbytes, chunk) for chunk in RAW_CHUNKS}
    works = {"kernel": partial(add_masks, words, masks), **raws}
    kernel_s, *raw_s = map(min, in_turns(works, 10).values())
    return min(raw_s) / kernel_s, len(masks) * words.nbytes / kernel_s / 1e9


def _keystream(total: int, chunk: int) -> None:
    """AES-256-CTR of that many zero bytes, in chunks, into one buffer."""
    cipher = Cipher(AES256(HASH), CTR(bytes(16))).encryptor()
    zeros, buffer = bytes(chunk), bytearray(chunk)
    for _ in range(-(-total // chunk)):
        cipher.update_into(zeros, buffer)
