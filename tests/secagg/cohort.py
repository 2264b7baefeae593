"""A whole cohort and its server in one process, message by message, so that tests can lie in between."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secagg import keys, parameters
from secagg.client import Client, SessionInput
from secagg.client_state import AggregationPolicy
from secagg.encoding import MessageType
from secagg.errors import OutOfOrder
from secagg.keys import NeighbourGraph, Tree, issue, root_of
from secagg.messages import ACTIVE, NO_BEACON, Deliver, Invite, Roster, RosterEntry, draw_beacon
from secagg.packing import PackedSegment
from secagg.server import Server

MODEL, LAYOUT, TASK = (bytes([number]) * 32 for number in (1, 2, 3))
VICTIM = 10
EXACT = (PackedSegment(5, 16, 8, 0.0, 255.0),)


def private(seed):
    """An Ed25519 key that is the same in every run."""
    return Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32, "little"))


def public(key):
    return key.public_key().public_bytes_raw()


SERVER, AUTHORITY = private(1), private(2)
DEADLINE = 2_000_000_000


def credential(identity, authority=AUTHORITY, device=None, expires=DEADLINE + 1):
    """The credential of a device, whose id is made of its key where there is none."""
    id_ = public(identity)
    return issue(authority, id_, hashlib.sha256(id_).digest()[:16] if device is None else device, expires)


class Lax(AggregationPolicy):
    """A policy that takes cohorts and parameters that are too small to be safe, so that tests can be exhaustive."""

    __slots__ = ()

    def check_parameters(self, chosen):
        pass


def dimension(invite):
    """D, the length of the vector."""
    return sum(segment.size for segment in invite.segments)


def invitation(segments=EXACT, **changes):
    fields = {
        "mode": ACTIVE, "task": TASK, "round": 7, "deadline": DEADLINE, "n_max": 200, "min_sum": 2,
        "w_max": 1000, "layout_hash": LAYOUT, "model_hash": MODEL, "segments": tuple(segments),
    }  # fmt: skip
    return Invite(**{**fields, **changes})


def policy(kind=AggregationPolicy, **changes):
    return kind(**{"server_key": public(SERVER), "authority": public(AUTHORITY), "min_sum": 2, **changes})


@dataclass
class Cohort:
    """n clients in slots 10, 11, …, and a server. `parameters`, by n, bypass the least cohort.

    vectors, weights: the inputs by slot; integers that `EXACT` carries without loss, and 1, where there are none.
    """

    n: int
    invite: Invite = field(default_factory=invitation)
    parameters: Callable | None = None
    kind: type = AggregationPolicy
    vectors: dict | None = None
    weights: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.parameters:
            self.server = Server(self.invite, SERVER, public(AUTHORITY), self.parameters)
            self.kind = Lax
        else:
            self.server = Server(self.invite, SERVER, public(AUTHORITY))
        self.identities = {10 + i: private(100 + i) for i in range(self.n)}
        self.policy = policy(self.kind, allow_honest=self.invite.mode != ACTIVE)
        self.vectors = self.vectors or integers(self.identities, dimension(self.invite))
        self.clients = {slot: self.client(slot) for slot in self.identities}
        self.replies = {}

    def client(self, slot, policy=None, **changes):
        identity = self.identities[slot]
        given = {
            "vector": self.vectors[slot], "weight": self.weights.get(slot, 1), "model_hash": MODEL,
            "layout_hash": LAYOUT, "credential": credential(identity),
        }  # fmt: skip
        return Client(identity, policy or self.policy, SessionInput(**{**given, **changes}))

    def everyone(self, without=()):
        return [slot for slot in self.clients if slot not in without]

    def total(self, slots):
        """The plain sum of some devices' vectors."""
        return sum(self.vectors[slot].astype(np.float64) for slot in slots)

    def answer(self, messages, without=()):
        """Every device that is there receives its message, and the server its answer."""
        for slot, message in messages.items():
            if slot not in without:
                self.replies[slot] = self.clients[slot].receive(message)
                self.server.receive(slot, self.replies[slot].message)

    def advertise(self, without=()):
        """Up to M2, which is returned by slot."""
        self.answer(dict.fromkeys(self.everyone(without), self.server.invitation))
        self.rosters = self.draw(self.server.advance().roster)
        return self.rosters

    def draw(self, roster):
        """M2 by slot, after the authority drew the beacon of a roster, if there is one to draw for."""
        beacon = draw_beacon(AUTHORITY, self.invite.hash, self.server.parameters, root_of(roster)) if roster else b""
        return self.server.advance(beacon).messages

    def share(self, rosters, without=()):
        """Up to M4."""
        self.answer(rosters, without)
        self.deliveries = self.server.advance().messages
        return self.deliveries

    def open(self, deliveries, without=()):
        """Up to M6."""
        self.answer(deliveries, without)
        return self.server.advance().messages

    def upload(self, included, without=()):
        """Up to M8; M4 may come in the place of M6, and then everybody answers it."""
        if MessageType.of(next(iter(included.values()))) is MessageType.DELIVER:
            included = self.open(included)
        self.answer(included, without)
        return self.server.advance().messages

    def confirm(self, survivors, without=()):
        """Up to M10; in mode honest nothing happens."""
        if self.invite.mode != ACTIVE:
            return survivors
        self.answer(survivors, without)
        return self.server.advance().messages

    def reveal(self, messages, without=()):
        """Up to M11."""
        self.answer(messages, without)

    def unmask(self, *workers):
        """The sum, and results that speak of it."""
        found = self.server.advance().unmasking.run(*workers)
        self.server.settle(found)
        return found

    def run(self, gone=((), (), (), (), (), ())):
        """A whole session; `gone` says who is missing at M1, M3, M5, M7, M9 and M11."""
        included = self.open(self.share(self.advertise(gone[0]), gone[1]), gone[2])
        self.reveal(self.confirm(self.upload(included, gone[3]), gone[4]), gone[5])
        return self.unmask()

    @property
    def revealed(self):
        """The slots of devices that revealed shares."""
        return {slot for slot, reply in self.replies.items() if MessageType.of(reply.message) is MessageType.UNMASK}

    @property
    def sid(self):
        """The session's id, once there is an M4."""
        return session_of(next(iter(self.deliveries.values())))

    def roster(self, slot):
        """A device's M2."""
        return Roster.decode(self.rosters[slot], self.invite.hash, self.invite.n_max)

    def delivery(self, slot):
        """A device's M4."""
        near = [entry.position for entry in self.roster(slot).neighbours]
        return Deliver.decode(self.deliveries[slot], self.sid, self.roster(slot).n, near)


def session_of(message):
    """The session that the head of a message names."""
    return message[2:34]


def relabelled(message, session):
    """The message, said to be of another session."""
    return message[:2] + session + message[34:]


def integers(slots, size, seed=0):
    """A vector of integers for every slot."""
    made = np.random.default_rng(seed)
    return {slot: made.integers(0, 256, size).astype(np.float32) for slot in slots}


def rosters_of(invite, devices, beacon=NO_BEACON):
    """M2 by slot, as a lying server makes it of any advertisements; devices by slot."""
    chosen = parameters.find(len(devices))
    tree = Tree([device.leaf for device in devices.values()])
    graph = NeighbourGraph(chosen, tree.root, beacon)
    entries = [RosterEntry(place, device, tree.path(place)) for place, device in enumerate(devices.values())]
    return {
        slot: Roster(
            chosen.n, chosen.k, chosen.t, tree.root, beacon, place, tree.path(place),
            tuple(entries[peer] for peer in graph.neighbours(place)),
        ).encode(invite.hash)
        for place, slot in enumerate(devices)
    }  # fmt: skip


def signed(invite, key=SERVER):
    return invite.body() + keys.sign(key, "invite", keys.NO_CONTEXT, invite.hash)


def dies(client, error, message):
    """The message raises just that, and from then on the device answers nothing."""
    with pytest.raises(error) as caught:
        client.receive(message)
    assert caught.type is error
    for late in (signed(invitation()), b"", *(bytes([number, 1]) + bytes(198) for number in MessageType)):
        with pytest.raises(OutOfOrder):
            client.receive(late)
    return caught.value


def only(found, positions, sid):
    return Deliver(positions, {p: box for p, box in found.boxes.items() if p in positions}).encode(sid, 9)
