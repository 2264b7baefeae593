"""A secure round whose neighbours are drawn: the authority is asked elsewhere, and the driver goes on."""

from concurrent.futures import Future

import numpy as np
import pytest

from coordinator.errors import BeaconUnavailable, NoLongerNeeded
from coordinator.store.tasks import Secagg
from fedcore.wire.messages import Accepted
from secagg.messages import Invite, Roster
from tests.coordinator.bundles import START
from tests.coordinator.conftest import Desk, draw_at_once
from tests.coordinator.test_secure import PHASES, run, seat, states

NAMES = [f"e{number:02}" for number in range(65)]
DRAWN = {
    "goal": 65, "minimum": 60, "secagg": Secagg(clip_norm=4.0, max_examples=10, phase_s=5.0, bits=16), "rounds": 1
}  # fmt: skip


class Authority:
    """Draws that are answered when the test says so."""

    def __init__(self):
        self.asked = []

    def __call__(self, wanted):
        self.asked.append((wanted, Future()))
        return self.asked[-1][1]


@pytest.fixture
def authority():
    return Authority()


def test_a_round_waits_for_its_beacon_and_others_go_on(store, register, authority):
    task = register(**DRAWN)
    desk = Desk(store, draw=authority)
    devices = seat(desk, NAMES)
    run(devices, PHASES[:1])
    ((wanted, future),) = authority.asked
    desk.pass_time(6)
    assert (states(store, task), devices[0].hear(2)) == (["reporting"], None)
    assert isinstance(desk.arrive("another"), Accepted)
    beacon = draw_at_once(wanted).result()
    future.set_result(beacon)
    desk.turn()
    found = Roster.decode(devices[0].hear(2), Invite.decode(wanted.invitation)[0].hash, 65)
    assert (found.n, found.k, found.beacon) == (65, wanted.neighbours, beacon)
    run(devices, PHASES[1:])
    assert states(store, task) == ["committed"]
    np.testing.assert_allclose(store.checkpoint(task, 1)["params"], START + np.array([0.5, -0.25, 0, 1]), atol=0.01)


@pytest.mark.security("draws the beacon … once for a device under an invitation")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [(BeaconUnavailable("nobody is there"), "no-beacon"), (bytes(64), "secagg-failed")],
    ids=["unreachable", "another's"],
)
def test_a_round_without_a_beacon_of_the_authority_is_abandoned(store, register, authority, answer, reason):
    task = register(**DRAWN)
    desk = Desk(store, draw=authority)
    devices = seat(desk, NAMES)
    run(devices, PHASES[:1])
    ((_, future),) = authority.asked
    if isinstance(answer, bytes):
        future.set_result(answer)
    else:
        future.set_exception(answer)
    desk.turn()
    assert [one.reason for one in store.rounds(task)][:1] == [reason]
    with pytest.raises(NoLongerNeeded):
        devices[0].hear(2)
