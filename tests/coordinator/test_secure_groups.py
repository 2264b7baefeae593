"""A secure round of several groups, and sums that are made elsewhere: on a clock that only the test moves."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest

from coordinator.errors import NoLongerNeeded
from coordinator.rules.states import AssignmentState
from coordinator.store.tasks import Secagg
from fedcore.wire.messages import Accepted
from secagg.errors import UnmaskCheckFailed
from secagg.messages import Invite, Roster
from tests.coordinator.bundles import START
from tests.coordinator.conftest import Desk, unmask_at_once
from tests.coordinator.test_secure import PHASES, run, seat, states

COHORT = 24
NAMES = [f"e{number:02}" for number in range(COHORT)]
SECAGG = Secagg(clip_norm=4.0, max_examples=10, phase_s=5.0, group_size=16)
DIVIDED = {"goal": COHORT, "minimum": 12, "secagg": SECAGG, "rounds": 1}
STEP = 2 * 4.0 / (2**20 - 1) * 10 / 2


def seat_all(desk):
    """The devices, each with a vector of its own, and their groups, which show once all have advertised."""
    devices = seat(desk, NAMES, {name: [number / 16, -number / 32, 0, 1] for number, name in enumerate(NAMES)})
    run(devices, PHASES[:1])
    return devices, groups_of(devices)


def groups_of(devices):
    """Devices that have advertised, by their groups."""
    groups = {}
    for device in devices:
        device.roster = Roster.decode(device.hear(2), Invite.decode(device.given.secagg)[0].hash, COHORT)
        groups.setdefault(device.roster.root, []).append(device)
    return list(groups.values())


def mean_of(devices):
    return START + np.mean([device.vector[:4] for device in devices], axis=0)


@pytest.mark.security("more devices than a task's group_size … is summed in groups")
def test_a_large_cohort_is_divided_into_even_groups_whose_sums_add_up(store, register, desk):
    task = register(**DIVIDED)
    devices, groups = seat_all(desk)
    assert [len(group) for group in groups] == [12, 12]
    assert {device.roster.n for device in devices} == {12}
    run(devices, PHASES[1:])
    assert states(store, task) == ["committed"]
    np.testing.assert_allclose(store.checkpoint(task, 1)["params"], mean_of(devices), atol=STEP)
    assert store.rounds(task)[0].reported == COHORT
    sums = Counter(device.result().aggregate_hash for device in devices)
    assert sorted(sums.values()) == [12, 12]


@pytest.mark.security("An honest server deals devices into groups by lot")
def test_devices_are_dealt_into_groups_by_lot(register, desk):
    register(**DIVIDED | {"rounds": 2})
    dealt = []
    for _ in range(2):
        devices, groups = seat_all(desk)
        dealt.append({frozenset(one.given.slot for one in group) for group in groups})
        run(devices, PHASES[1:])
    assert len(dealt[0]) == 2
    assert dealt[0] != dealt[1], "which happens once in a million times"


@pytest.mark.security("a device's min_cohort is held against that number")
def test_an_invitation_tells_what_a_groups_sum_may_be(register, desk):
    register(**DIVIDED | {"minimum": COHORT})
    invite, _ = Invite.decode(seat(desk, NAMES)[0].given.secagg)
    assert (invite.n_max, invite.min_sum) == (16, 8)


@pytest.mark.parametrize("phase", range(1, 6))
def test_a_group_that_fails_does_not_sink_the_round(store, register, desk, phase):
    task = register(**DIVIDED)
    _, (unlucky, lucky) = seat_all(desk)
    run(unlucky + lucky, PHASES[1:phase])
    run(unlucky[5:] + lucky, PHASES[phase : phase + 1])
    alone = 4 if phase < 4 else 6  # how far a group comes while the other waits for its devices
    run(lucky, PHASES[phase + 1 : alone])
    desk.pass_time(5)
    run(lucky, PHASES[max(phase + 1, alone) :])
    if states(store, task) == ["reporting"]:
        desk.pass_time(5)
    assert states(store, task) == ["committed"]
    np.testing.assert_allclose(store.checkpoint(task, 1)["params"], mean_of(lucky), atol=STEP)
    counted = {one.device for one in store.cohort(task, 1) if one.state is AssignmentState.REPORTED}
    assert len(counted) == store.rounds(task)[0].reported == 12
    ended = Counter(one.state for one in store.cohort(task, 1))
    assert (ended[AssignmentState.EXPIRED], ended[AssignmentState.NOT_NEEDED]) == (5, 7)
    assert all(device.result().summed for device in lucky)


def test_no_group_hears_who_survived_before_all_have_their_reports(register, desk):
    register(**DIVIDED)
    _, (early, late) = seat_all(desk)
    run(early + late, PHASES[1:3])
    run(early, PHASES[3:4])
    run(late[1:], PHASES[3:4])
    assert early[0].hear(8) is None
    run(late[:1], PHASES[3:4])
    assert early[0].hear(8) is not None


def test_with_too_few_in_all_groups_no_share_is_asked_for(store, register, desk):
    task = register(**DIVIDED | {"minimum": 22})
    devices, groups = seat_all(desk)
    run(devices, PHASES[1:3])
    there = [device for group in groups for device in group[2:]]
    run(there, PHASES[3:4])
    desk.pass_time(5)
    assert [one.reason for one in store.rounds(task)] == ["too-few-reports"]
    for device in there:
        with pytest.raises(NoLongerNeeded):
            device.hear(8)


def test_a_group_whose_masks_do_not_come_off_is_left_out(store, register, new_desk):
    left = [UnmaskCheckFailed("spoilt")]

    def unmask(work):
        if not left:
            return unmask_at_once(work)
        future = Future()
        future.set_exception(left.pop())
        return future

    task = register(**DIVIDED)
    devices, groups = seat_all(Desk(store, unmask=unmask))
    run(devices, PHASES[1:])
    assert states(store, task) == ["committed"]
    found = store.checkpoint(task, 1)["params"]
    assert any(np.allclose(found, mean_of(group), atol=STEP) for group in groups)


class Shelf:
    """Sums that are made when the test says so."""

    def __init__(self):
        self.work, self.futures = [], []

    def __call__(self, work):
        self.work.append(work)
        self.futures.append(Future())
        return self.futures[-1]

    def make(self):
        for work, future in zip(self.work, self.futures, strict=True):
            future.set_result(work.run())


def test_a_round_outlives_its_deadline_while_its_sum_is_made(store, register):
    task, shelf = register(**DIVIDED), Shelf()
    desk = Desk(store, unmask=shelf)
    devices, _ = seat_all(desk)
    run(devices, PHASES[1:])
    desk.pass_time(10_000)
    assert states(store, task) == ["reporting"]
    assert isinstance(desk.arrive("another"), Accepted)
    shelf.make()
    desk.turn()
    assert states(store, task) == ["committed"]
    assert devices[0].result().summed
    desk.pass_time(60)
    assert {one.shape: one.count for one in store.sessions(task) if one.task} == {
        "accepted > waited > assigned > reported": len(devices)
    }


def test_a_cancelled_task_makes_no_sum_any_more(store, register):
    task, shelf = register(**DIVIDED), Shelf()
    desk = Desk(store, unmask=shelf)
    devices, _ = seat_all(desk)
    run(devices, PHASES[1:])
    store.cancel(task)
    desk.pass_time(1)
    assert all(future.cancelled() for future in shelf.futures)
    assert states(store, task) == ["abandoned"]
    assert not devices[0].result().summed
