"""Devices that further attempts at a secure round must not draw: that revealed shares, or may have lied."""

from concurrent.futures import Future

import pytest

from coordinator.rules.states import TaskState
from secagg.errors import UnmaskCheckFailed
from secagg.messages import BOX_BYTES, Shares
from tests.coordinator.conftest import Desk, unmask_at_once
from tests.coordinator.test_secure import NAMES, PHASES, SECURE, run, seat

OTHERS = tuple(f"other{number}" for number in range(8))
STRICT = SECURE | {"selection_timeout_s": 30.0}


def fails(work):
    """No sum: its masks do not come off."""
    future = Future()
    future.set_exception(UnmaskCheckFailed("spoilt"))
    return future


def drawn(store, task, attempt):
    with store.database.reading() as records:
        return {one.device for one in records.cohorts.drawn(task, 1, attempt)}


def left_out(store, task):
    with store.database.reading() as records:
        return records.left_out(task, 1)


def said(store, task):
    return store.progress_of(task).sentence


def revealed_in_vain(store, register):
    """A task whose first attempt at a round was abandoned after all devices had revealed shares."""
    task, desk = register(**STRICT), Desk(store, unmask=fails)
    run(seat(desk))
    assert [one.reason for one in store.rounds(task)] == ["secagg-failed"]
    return task, desk


def test_devices_that_revealed_are_not_drawn_again_for_the_round(store, register):
    task, desk = revealed_in_vain(store, register)
    for name in NAMES:
        desk.wait(name, seconds=100)
    seat(desk, OTHERS)
    assert drawn(store, task, 2) == set(OTHERS)


@pytest.mark.security("the session ends in BadShare and names it, and the attempt is lost")
def test_a_round_that_lacks_devices_says_that_earlier_attempts_used_them(store, register):
    task, desk = revealed_in_vain(store, register)
    for name in NAMES:
        desk.wait(name, seconds=1000)
    desk.pass_time(4)
    assert "8 left out after an earlier attempt at this round" in said(store, task)


def test_another_driver_knows_who_revealed(store, register, new_desk):
    task, desk = revealed_in_vain(store, register)
    desk.driver.drain()
    desk.turn()
    later = new_desk()
    for name in NAMES:
        later.wait(name, seconds=100)
    seat(later, OTHERS)
    assert drawn(store, task, 2) == set(OTHERS)


def test_devices_that_revealed_take_part_in_the_next_round(store, register, desk):
    task = register(**STRICT | {"rounds": 2})
    run(seat(desk))
    run(seat(desk))
    assert [one.state.value for one in store.rounds(task)] == ["committed", "committed"]


def test_devices_that_revealed_in_vain_rest_as_if_the_round_were_theirs(store, register, new_desk):
    task = register(**STRICT | {"rounds": 3}, min_separation_rounds=2)
    sums = iter((fails, unmask_at_once))

    def unmask(work):
        return next(sums)(work)

    desk = Desk(store, unmask=unmask)
    run(seat(desk))
    run(seat(desk, OTHERS))
    assert [one.state.value for one in store.rounds(task)] == ["abandoned", "committed"]
    assert [desk.arrive(name).reason for name in (*NAMES, *OTHERS)] == ["resting"] * 16
    desk.driver.drain()
    desk.turn()
    later = new_desk()
    assert [later.arrive(name).reason for name in (*NAMES, *OTHERS)] == ["resting"] * 16


def test_a_device_that_says_that_it_revealed_is_not_drawn_again(store, register, desk):
    task = register(**STRICT | {"goal": 8, "over_selection": 1.25})
    devices = seat(desk, [*NAMES, "d8", "d9"])
    desk.give_up(devices[8].given, "already-revealed")
    assert left_out(store, task) == {store.cohort(task, 1)[8].device}


def spoil(devices, liar):
    """One device sends boxes that open for nobody, and everybody complains."""
    run(devices, PHASES[:1])
    for device in devices:
        answer = device.client.receive(device.hear(2)).message
        if device is liar:
            found = Shares.decode(answer, answer[2:34], len(devices) - 1)
            answer = Shares(found.commitment, (bytes(BOX_BYTES),) * len(found.boxes)).encode(answer[2:34])
        device.say(3, answer)
    run(devices, PHASES[2:3])


def test_a_round_commits_without_a_device_whose_boxes_do_not_open(store, register, desk):
    task = register(**SECURE | {"goal": 10, "minimum": 8})
    devices = seat(desk, [f"e{number}" for number in range(10)])
    spoil(devices, devices[4])
    run([one for one in devices if one is not devices[4]], PHASES[3:])
    assert [one.state.value for one in store.rounds(task)] == ["committed"]
    assert store.rounds(task)[0].reported == 9


def test_attempts_that_fail_for_known_culprits_do_not_pause_a_task(store, register, desk):
    """Six liars, each in an attempt of its own; the task pauses after five attempts that fail."""
    task, names, liars = register(**STRICT), list(NAMES), set()
    for number in range(6):
        devices = seat(desk, names)
        spoil(devices, devices[0])
        assert store.rounds(task)[-1].reason == "culprits-known"
        liars = left_out(store, task)
        assert len(liars) == number + 1
        names = [name for name in names if name not in liars] + [f"fresh{number}"]
    assert store.task(task).state is TaskState.ACTIVE
    again = [desk.wait(name, seconds=1000) for name in liars]
    run(seat(desk, names))
    assert [one.state.value for one in store.rounds(task)] == ["abandoned"] * 6 + ["committed"]
    assert not any(one.done() for one in again)


def test_devices_that_revealed_are_not_drawn_after_a_pause(store, register, desk, tmp_path):
    task = register(**STRICT)
    blob = tmp_path / "blobs" / store.task(task).initial.state_sha256
    data = blob.read_bytes()
    devices = seat(desk)
    blob.unlink()
    run(devices)
    assert [one.reason for one in store.rounds(task)] == ["blob-unreadable"]
    assert left_out(store, task) == {one.device for one in store.cohort(task, 1)}
    desk.pass_time(1)  # the driver learns of the pause
    blob.write_bytes(data)
    store.resume(task)
    desk.pass_time(1)
    for name in NAMES:
        desk.wait(name, seconds=100)
    seat(desk, OTHERS)
    assert drawn(store, task, 2) == set(OTHERS)
