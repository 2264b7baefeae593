"""Beacons of the authority: one draw for a device under an invitation, over HTTP for coordinators that it knows."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from authority.configuration import AuthorityConfig
from authority.errors import BeaconRefused
from authority.service import Beacons
from coordinator.errors import BeaconUnavailable
from coordinator.keys import Keys
from coordinator.secure.beacon_client import BeaconClient
from fedcore.errors import InvalidKey
from fedcore.signing import SucceedingKey, key_text
from fedcore.wire.messages import RequestBeacon
from secagg.errors import BadSignature
from secagg.keys import hash_of, root_of
from secagg.messages import check_beacon
from secagg.parameters import find
from tests.secagg.cohort import AUTHORITY, DEADLINE, SERVER, invitation, public, signed
from tests.servers import authority_serving, proxied

N = 65
CHOSEN = find(N)
LEAVES = [hash_of(bytes([number])) for number in range(N)]
INVITE = invitation()


def request(leaves=LEAVES, invite=INVITE, **changes):
    given = {
        "invitation": signed(invite), "roster": b"".join(leaves), "neighbours": CHOSEN.k, "shares": CHOSEN.t
    }  # fmt: skip
    return RequestBeacon(**given | changes)


@pytest.fixture
def beacons():
    return Beacons(AUTHORITY)


def test_a_beacon_is_the_same_for_the_same_roster_and_devices_take_it(beacons):
    drawn = beacons.draw(request(), 0)
    assert drawn == beacons.draw(request(), 1)
    check_beacon(public(AUTHORITY), drawn, INVITE.hash, CHOSEN, root_of(LEAVES))


@pytest.mark.security("draws the beacon … once for a device under an invitation")
@pytest.mark.parametrize(
    "other",
    [
        request([LEAVES[0], *(hash_of(bytes([1, number])) for number in range(1, N))]),
        request(LEAVES[::-1]),
        request(LEAVES[:-1]),
        request(neighbours=CHOSEN.k + 2),
        request(shares=CHOSEN.t + 1),
    ],
)
def test_a_device_gets_no_second_draw_under_one_invitation(beacons, other):
    """Not with other devices around it, another order, fewer, or with other parameters: each would be a try."""
    first = beacons.draw(request(), 0)
    with pytest.raises(BeaconRefused, match="drawn once"):
        beacons.draw(other, 0)
    assert beacons.draw(request(), 0) == first


def test_other_groups_of_an_invitation_and_other_invitations_are_drawn(beacons):
    first = beacons.draw(request(), 0)
    other_group = beacons.draw(request([hash_of(leaf) for leaf in LEAVES]), 0)
    next_round = beacons.draw(request(invite=invitation(round=8)), 0)
    assert len({first, other_group, next_round}) == 3


def test_nothing_is_forgotten_before_its_deadline_and_drawn_after_it(beacons):
    beacons.draw(request(), DEADLINE)
    with pytest.raises(BeaconRefused, match="drawn once"):
        beacons.draw(request(LEAVES[::-1]), DEADLINE)
    for now in (DEADLINE + 1, 0):  # a clock that is set back brings no deadline back
        with pytest.raises(BeaconRefused, match="deadline"):
            beacons.draw(request(LEAVES[::-1]), now)
    assert not beacons._drawn


def test_a_full_memory_refuses_new_rosters_and_forgets_none():
    beacons = Beacons(AUTHORITY, most=2 * N - 1)
    beacons.draw(request(), 0)
    later = invitation(round=8, deadline=DEADLINE + 9)
    with pytest.raises(BeaconRefused, match="remembered"):
        beacons.draw(request(invite=later), 0)
    with pytest.raises(BeaconRefused, match="drawn once"):
        beacons.draw(request(LEAVES[::-1]), 0)
    assert beacons.draw(request(invite=later), DEADLINE + 1)


@pytest.mark.parametrize(
    "wrong", [request(roster=b""), request(roster=bytes(33)), request(roster=bytes(32 * 201)), request(invitation=b"")]
)
def test_a_request_that_makes_no_sense_is_refused(beacons, wrong):
    with pytest.raises(BeaconRefused):
        beacons.draw(wrong, 0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """The URL of an authority that draws beacons for one server, and its public key."""
    folder = tmp_path_factory.mktemp("authority")
    key = SucceedingKey.new("authority")
    key.save(folder / "key")
    config = AuthorityConfig(
        key=folder / "key", port=0, accept_unattested=True, server_keys=(key_text(public(SERVER)),)
    )
    with authority_serving(config) as url:
        yield url, key.public


def asked(url, wanted, key=SERVER):
    client = BeaconClient(url, Keys(SucceedingKey("server", key)))
    try:
        return client(wanted).result()
    finally:
        client.close()


def test_a_coordinator_asks_over_http_and_gets_one_draw(authority, monkeypatch):
    proxied(monkeypatch)
    url, public_key = authority
    drawn = asked(url, request())
    check_beacon(public_key, drawn, INVITE.hash, CHOSEN, root_of(LEAVES))
    with pytest.raises(BadSignature):
        check_beacon(public_key, drawn, INVITE.hash, CHOSEN, root_of(LEAVES[::-1]))
    with pytest.raises(BeaconUnavailable, match="drawn once"):
        asked(url, request(LEAVES[::-1]))


def test_strangers_can_use_up_no_draw_of_a_coordinator(authority):
    url, _ = authority
    mine = request(invite=invitation(round=9))
    with pytest.raises(BeaconUnavailable, match=r"beacon-refused.*--server-key"):
        asked(url, request(LEAVES[::-1], invite=invitation(round=9)), Ed25519PrivateKey.generate())
    assert asked(url, mine)


def test_an_authority_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(BeaconUnavailable, match="9/v1/beacons"):
        asked("http://127.0.0.1:9", request())
    with pytest.raises(BeaconUnavailable, match="authority_url"):
        asked(None, request())


def test_an_authority_does_not_start_with_a_servers_key_that_is_none(tmp_path):
    SucceedingKey.new("authority").save(tmp_path / "key")
    with (
        pytest.raises(InvalidKey),
        authority_serving(
            AuthorityConfig(key=tmp_path / "key", port=0, accept_unattested=True, server_keys=("ed25519:x",))
        ),
    ):
        pass
