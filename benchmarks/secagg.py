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
from functools import partial
from typing import Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from benchmarks.runner import SecaggOptions
from benchmarks.usage import in_turns, least_cpu_s
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
        seconds, sizes = _client(workload)
        client_s = min(client_s, seconds)
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


class _Stopwatch:
    """Adds up the CPU time of a device's steps, and the sizes of the messages that it receives and sends."""

    def __init__(self) -> None:
        self.seconds, self.up, self.down = 0.0, 0, 0

    def step(self, device: Client, message: bytes) -> bytes:
        started = time.process_time()
        answer = _answer(device, message)
        self.seconds += time.process_time() - started
        self.down += len(message)
        self.up += len(answer)
        return answer


def _client(workload: Workload) -> tuple[float, tuple[int, int]]:
    """Seconds, and bytes up and down, of the device at position 0."""
    server_key, authority = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    identities = [Ed25519PrivateKey.generate() for _ in range(workload.n)]
    invite = workload.invite()
    server = Server(invite, server_key, authority.public_key().public_bytes_raw())
    policy = AggregationPolicy(
        server_key.public_key().public_bytes_raw(), authority.public_key().public_bytes_raw(), 2, True
    )
    vector_D = np.random.default_rng(0).normal(0, 0.01, workload.dim).astype(np.float32)
    ids = [identity.public_key().public_bytes_raw() for identity in identities]
    credentials = [issue(authority, id_, id_[:DEVICE_BYTES], NEVER) for id_ in ids]
    clients = [
        Client(identity, policy, SessionInput(vector_D, 10, HASH, HASH, credential))
        for identity, credential in zip(identities, credentials, strict=True)
    ]
    watch, device = _Stopwatch(), clients[0]

    server.receive(0, watch.step(device, server.invitation))
    for slot, client in enumerate(clients[1:], 1):
        server.receive(slot, _answer(client, server.invitation))
    roster = server.advance().roster
    chosen = server.parameters
    beacon = messages.draw_beacon(authority, invite.hash, chosen, root_of(roster)) if roster else b""
    rosters = server.advance(beacon).messages
    shared = watch.step(device, rosters[0])

    sid, n = shared[2:34], workload.n
    near = [entry.position for entry in messages.Roster.decode(rosters[0], invite.hash, n).neighbours]
    everyone = frozenset(range(n))
    boxes = {position: _box_for_0(clients[position], rosters[position], sid, invite) for position in near}
    watch.step(device, messages.Deliver(everyone, boxes).encode(sid, n))
    watch.step(device, messages.Included(everyone).encode(sid, n))
    watch.step(device, messages.Survivors(workload.alive).encode(sid, n))
    if workload.signed:
        digest = messages.survivors_digest(everyone, workload.alive, n)
        signers = [position for position in near if position in workload.alive][: parameters.find(n).t]
        signed = {i: (digest, keys.sign(identities[i], "survivors", sid, digest)) for i in signers}
        watch.step(device, messages.Confirmations(signed).encode(sid))
    watch.down += len(messages.SessionResult(messages.DONE, HASH, HASH).encode(sid))
    return watch.seconds, (watch.up, watch.down)


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
