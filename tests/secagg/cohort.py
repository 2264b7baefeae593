"""A whole cohort and its server in one process, step by step, so that tests can lie in between."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secagg import keys
from secagg.client import Client
from secagg.errors import OutOfOrder
from secagg.messages import ACTIVE, Deliver, Invite
from secagg.packing import Segment
from secagg.policy import AggregationPolicy
from secagg.server import Server

MODEL, LAYOUT, TASK, BEACON = (bytes([number]) * 32 for number in (1, 2, 3, 4))
VICTIM = 10
EXACT = (Segment(5, 16, 8, 0.0, 255.0),)


def private(seed):
    """An Ed25519 key that is the same in every run."""
    return Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32, "little"))


def public(key):
    return key.public_key().public_bytes_raw()


SERVER, AUTHORITY = private(1), private(2)


class Lax(AggregationPolicy):
    """A policy that takes cohorts and parameters that are too small to be safe, so that tests can be exhaustive."""

    __slots__ = ()

    def check_parameters(self, chosen):
        pass


def invitation(segments=EXACT, **changes):
    fields = {
        "mode": ACTIVE, "task": TASK, "round": 7, "deadline": 2_000_000_000, "n_max": 200, "min_sum": 2,
        "w_max": 1000, "layout_hash": LAYOUT, "model_hash": MODEL, "segments": tuple(segments),
    }  # fmt: skip
    return Invite(**{**fields, **changes})


def policy(kind=AggregationPolicy, **changes):
    return kind(**{"server_key": public(SERVER), "authority": public(AUTHORITY), "min_sum": 2, **changes})


@dataclass
class Cohort:
    """n clients in slots 10, 11, …, and a server. `parameters`, by n, bypass the least cohort."""

    n: int
    invite: Invite = field(default_factory=invitation)
    parameters: Callable | None = None
    kind: type = AggregationPolicy

    def __post_init__(self):
        if self.parameters:
            self.server = Server(self.invite, SERVER, public(AUTHORITY), self.parameters)
            self.kind = Lax
        else:
            self.server = Server(self.invite, SERVER, public(AUTHORITY))
        self.identities = {10 + i: private(100 + i) for i in range(self.n)}
        self.policy = policy(self.kind, allow_honest=self.invite.mode != ACTIVE)
        self.clients = {slot: self.client(slot) for slot in self.identities}
        self.steps = {}
        self.revealed = set()

    def client(self, slot, **changes):
        identity = self.identities[slot]
        credential = keys.enrol(AUTHORITY, public(identity))
        return Client(identity, **{"policy": self.policy, "credential": credential, **changes})

    def everyone(self, without=()):
        return [slot for slot in self.clients if slot not in without]

    def advertise(self, without=()):
        """Up to M2, which is returned by slot."""
        for slot in self.everyone(without):
            self.server.receive(slot, self.clients[slot].invite(self.server.invitation, MODEL, LAYOUT))
        self.root = self.server.fix_roster()
        return self.server.open_roster(BEACON)

    def share(self, rosters, without=()):
        """Up to M4."""
        for slot, message in rosters.items():
            if slot not in without:
                self.server.receive(slot, self.clients[slot].roster(message))
        return self.server.close_phase()

    def upload(self, deliveries, vectors, without=(), weights=None):
        """Up to M6."""
        for slot, message in deliveries.items():
            if slot not in without:
                self.clients[slot].deliver(message)
                self.steps[slot] = self.clients[slot].mask(vectors[slot], (weights or {}).get(slot, 1))
                self.server.receive(slot, self.steps[slot].message)
        return self.server.close_phase()

    def confirm(self, survivors, without=()):
        """Up to M8; in mode honest nothing happens."""
        if self.invite.mode != ACTIVE:
            return survivors
        for slot, message in survivors.items():
            if slot not in without:
                self.steps[slot] = self.clients[slot].survivors(message)
                self.server.receive(slot, self.steps[slot].message)
        return self.server.close_phase()

    def reveal(self, messages, without=()):
        """Up to M9."""
        for slot, message in messages.items():
            if slot not in without:
                client = self.clients[slot]
                self.steps[slot] = (client.confirmations if self.invite.mode == ACTIVE else client.survivors)(message)
                self.revealed.add(slot)
                self.server.receive(slot, self.steps[slot].message)

    def run(self, vectors, gone=((), (), (), (), ()), weights=None):
        """A whole session; `gone` says who is missing at M1, M3, M5, M7 and M9."""
        survivors = self.upload(self.share(self.advertise(gone[0]), gone[1]), vectors, gone[2], weights)
        self.reveal(self.confirm(survivors, gone[3]), gone[4])
        return self.server.unmask()


def vectors_for(cohort, seed=0):
    """Integers that `EXACT` carries without loss, by slot."""
    made = np.random.default_rng(seed)
    size = cohort.invite.dimension
    return {slot: made.integers(0, 256, size).astype(np.float32) for slot in cohort.clients}


def signed(invite, key=SERVER):
    return invite.body() + keys.sign(key, "invite", keys.NO_CONTEXT, invite.hash)


def dies(client, error, step, *arguments):
    """The step raises just that, and from then on the device answers nothing."""
    with pytest.raises(error) as caught:
        step(*arguments)
    assert caught.type is error
    for late in (client.roster, client.deliver, client.survivors, client.confirmations, client.result):
        with pytest.raises(OutOfOrder):
            late(bytes(200))
    with pytest.raises(OutOfOrder):
        client.invite(signed(invitation()), MODEL, LAYOUT)
    return caught.value


def only(found, positions, sid):
    return Deliver(positions, {p: box for p, box in found.boxes.items() if p in positions}).encode(sid, 9)
