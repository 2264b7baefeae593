"""Both shares of one device never leave, under any order of requests, repeats and restarts."""

from functools import cache

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from secagg import keys
from secagg.client import Client
from secagg.client_state import ClientStage, ClientState
from secagg.encoding import MessageType
from secagg.errors import SecaggError
from secagg.messages import ACTIVE, HONEST, Confirm, Confirmations, Survivors, Unmask, survivors_digest
from secagg.parameters import GraphParameters
from tests.secagg.cohort import Cohort, invitation

pytestmark = [
    pytest.mark.security("It releases no share after that, and before it at most one of each neighbour"),
    pytest.mark.security("both of its secrets come out only if at least 2t − k of its neighbours are corrupt"),
]

N, T, SLOT = 5, 2, 10
CRASHES = st.sampled_from(["", "before it is kept", "before it is sent"])


@cache
def uploaded(mode):
    """A cohort after its uploads; at M3 one device had left."""
    cohort = Cohort(N + 1, invitation(mode=mode, min_sum=2), lambda n: GraphParameters(n, n - 1, T))
    cohort.upload(cohort.share(cohort.advertise(), without=(10 + N,)))
    return cohort


class Reveals(RuleBasedStateMachine):
    """A device's host, which keeps the state before it sends; the server asks anything, in any order."""

    mode = ACTIVE
    sets = Bundle("sets")

    def __init__(self):
        super().__init__()
        self.cohort = uploaded(self.mode)
        self.sid = self.cohort.sid
        self.shared = frozenset(range(N))
        self.kept = self.cohort.replies[SLOT].keep
        self.sent, self.digests = set(), set()
        self.restart()

    @rule()
    def restart(self):
        self.client = Client.restore(self.cohort.identities[SLOT], self.cohort.policy, self.kept)

    @rule(target=sets, alive=st.frozensets(st.integers(0, N), min_size=2), usual=st.booleans())
    def choose(self, alive, usual):
        return (alive - {N}) | {0} if usual else alive

    @rule(alive=sets, crash=CRASHES)
    def ask_survivors(self, alive, crash):
        self.take(Survivors(alive).encode(self.sid, N + 1), crash)

    @rule(alive=sets, who=st.frozensets(st.integers(1, N - 1), min_size=T), crash=CRASHES)
    def ask_confirmations(self, alive, who, crash):
        digest = survivors_digest(self.shared, alive, N + 1)
        signed = {
            position: (digest, keys.sign(self.cohort.identities[10 + position], "survivors", self.sid, digest))
            for position in who
        }
        self.take(Confirmations(signed).encode(self.sid), crash)

    def take(self, message, crash):
        """A host: the state to keep is durable first; a crash comes before or after that."""
        try:
            made = self.client.receive(message)
        except SecaggError:
            return
        if crash != "before it is kept":
            self.kept = made.keep
        if crash:
            self.restart()
            return
        if MessageType.of(made.message) is MessageType.CONFIRM:
            self.digests.add(Confirm.decode(made.message, self.sid).signature)
        else:
            shares = Unmask.decode(made.message, self.sid).shares
            self.sent |= {(position, kind, share) for position, (kind, share) in shares.items()}

    @invariant()
    def one_share_of_each_leaves(self):
        positions = [position for position, _, _ in self.sent]
        assert len(positions) == len(set(positions))
        assert len(self.digests) <= 1
        kept = ClientState.decode(self.kept)
        if kept.stage is ClientStage.REVEALED:
            assert all(not (peer.seed_share and peer.key_share) for peer in kept.peers)


class RevealsHonest(Reveals):
    mode = HONEST


BUDGET = settings(max_examples=60, stateful_step_count=15, deadline=None)
TestActive, TestHonest = Reveals.TestCase, RevealsHonest.TestCase
TestActive.settings = TestHonest.settings = BUDGET


def test_the_machine_can_reveal():
    """Else the invariant would hold for want of shares."""
    machine = Reveals()
    alive = frozenset(range(N))
    machine.ask_survivors(alive, "")
    assert not machine.sent
    machine.ask_confirmations(alive, frozenset({1, 2, 3}), "")
    assert len(machine.sent) == N - 1


def test_no_share_is_sent_from_a_state_that_was_damaged():
    cohort = uploaded(ACTIVE)
    for wrong in (b"", cohort.replies[SLOT].keep[:-1], b"\2" + cohort.replies[SLOT].keep[1:]):
        with pytest.raises(SecaggError):
            Client.restore(cohort.identities[SLOT], cohort.policy, wrong)
