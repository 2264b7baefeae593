"""A server that tries beacons, in a cohort that is large enough for neighbours to be drawn."""

from dataclasses import replace

import pytest

from secagg.errors import BadSignature, Malformed, OutOfOrder
from secagg.keys import NeighbourGraph, hash_of, root_of
from secagg.messages import BEACON_BYTES, Advertise, Roster, RosterEntry, draw_beacon
from secagg.parameters import GraphParameters
from tests.secagg.cohort import AUTHORITY, SERVER, VICTIM, Cohort, dies, private

N = 65


@pytest.fixture
def cohort():
    """A cohort whose devices wait for M2."""
    made = Cohort(N)
    made.answer(dict.fromkeys(made.clients, made.server.invitation))
    return made


def of_a_liar(cohort, beacon, chosen=None):
    """M2 by slot, as a server makes it with a beacon and parameters of its own choice."""
    chosen = chosen or cohort.server.parameters
    devices = [Advertise.decode(cohort.replies[slot].message, cohort.invite.hash) for slot in cohort.clients]
    tree = cohort.server._tree
    graph = NeighbourGraph(chosen, tree.root, beacon)
    entries = [RosterEntry(place, device, tree.path(place)) for place, device in enumerate(devices)]
    return {
        slot: Roster(
            chosen.n, chosen.k, chosen.t, tree.root, beacon, place, tree.path(place),
            tuple(entries[peer] for peer in graph.neighbours(place)),
        ).encode(cohort.invite.hash)
        for place, slot in enumerate(cohort.clients)
    }  # fmt: skip


@pytest.mark.security("A coordinator that lies cannot try beacons")
@pytest.mark.security("takes another beacon than the authority drew")
def test_every_honest_device_refuses_a_beacon_that_is_not_the_authoritys(cohort):
    roster = cohort.server.advance().roster
    chosen, root, invite_hash = cohort.server.parameters, root_of(roster), cohort.invite.hash
    tries = [
        bytes(BEACON_BYTES),
        draw_beacon(SERVER, invite_hash, chosen, root),
        draw_beacon(private(3), invite_hash, chosen, root),
        draw_beacon(AUTHORITY, bytes(32), chosen, root),
        draw_beacon(AUTHORITY, invite_hash, chosen, hash_of(root)),
        draw_beacon(AUTHORITY, invite_hash, replace(chosen, k=chosen.k + 2), root),
    ]
    for number, (slot, client) in enumerate(cohort.clients.items()):
        dies(client, BadSignature, of_a_liar(cohort, tries[number % len(tries)])[slot])


@pytest.mark.security("A coordinator that lies cannot try beacons")
@pytest.mark.security("takes another beacon than the authority drew")
def test_parameters_that_were_not_drawn_for_are_refused(cohort):
    """A larger k puts others near, so that a server could try each."""
    roster = cohort.server.advance().roster
    chosen = cohort.server.parameters
    beacon = draw_beacon(AUTHORITY, cohort.invite.hash, chosen, root_of(roster))
    wider = GraphParameters(N, chosen.k + 2, chosen.t + 2)
    cohort.policy.check_parameters(wider)
    dies(cohort.clients[VICTIM], BadSignature, of_a_liar(cohort, beacon, wider)[VICTIM])


def test_a_session_with_the_authoritys_beacon_comes_to_its_sum(cohort):
    rosters = cohort.draw(cohort.server.advance().roster)
    assert len({len(message) for message in rosters.values()}) == 1
    cohort.reveal(cohort.confirm(cohort.upload(cohort.share(rosters))))
    assert (cohort.unmask().total.sums == cohort.total(cohort.clients)).all()


def test_a_server_ends_a_session_without_a_beacon_of_the_authority():
    for beacon, error in ((b"", Malformed), (bytes(32), Malformed), (bytes(BEACON_BYTES), BadSignature)):
        server = Cohort(N)
        server.answer(dict.fromkeys(server.clients, server.server.invitation))
        server.server.advance()
        with pytest.raises(error):
            server.server.advance(beacon)
        with pytest.raises(OutOfOrder):
            server.server.advance()


@pytest.mark.security("draws the beacon … once for a device under an invitation")
def test_nothing_is_drawn_where_everyone_is_everyones_neighbour():
    small = Cohort(64)
    small.answer(dict.fromkeys(small.clients, small.server.invitation))
    assert small.server.advance().roster == ()
    assert small.server.advance().messages.keys() == small.clients.keys()
