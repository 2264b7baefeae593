"""Secure rounds on the driver: what devices say as pure clients, on a clock that only the test moves."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import errors
from coordinator.commands import AwaitMessage, PutMessage
from coordinator.rules.states import AssignmentState, TaskState
from coordinator.secure.round import invitation
from coordinator.store.tasks import Secagg, TaskSettings
from fedcore.masking import layout_hash, model_hash, summed_values
from fedcore.release import SumBounds
from secagg import packing
from secagg.client import Client, SessionInput
from secagg.client_state import AggregationPolicy
from secagg.keys import issue
from secagg.messages import Invite
from tests.coordinator.bundles import START, make_plan, report_values
from tests.coordinator.conftest import AUTHORITY, KEYS, Desk

NEVER = 1 << 40
PLAN = make_plan()
NAMES = tuple(f"d{number}" for number in range(8))
SECURE = {"goal": 8, "minimum": 8, "secagg": Secagg(clip_norm=4.0, max_examples=10, phase_s=5.0), "rounds": 1}
BOUNDS = SumBounds(clip_norm=4.0, bits=20, max_examples=10, min_sum=8)
LENIENT = SECURE | {"goal": 10, "minimum": 8}


def public(key):
    return key.public_key().public_bytes_raw()


def device_of(given):
    """The id of an assignment's device, in bytes."""
    return hashlib.sha256(given.assignment.encode()).digest()[:16]


class Device:
    """One seat of a secure round."""

    def __init__(self, desk, given, delta, weight=1, loss=0.0, plan=PLAN):
        self.desk, self.given = desk, given
        self.vector = summed_values(plan.report, BOUNDS, report_values(delta, weight, loss, plan))
        identity = Ed25519PrivateKey.generate()
        policy = AggregationPolicy(KEYS.server.public, public(AUTHORITY), 8)
        held = model_hash(given.plan, given.checkpoint), layout_hash(plan.report, given.seed)
        brought = SessionInput(self.vector, weight, *held, issue(AUTHORITY, public(identity), device_of(given), NEVER))
        self.client = Client(identity, policy, brought)
        self.said = {}

    def say(self, number, message):
        self.said[number] = message
        digest = hashlib.sha256(message).hexdigest()
        return self.desk.ask(PutMessage(self.given.assignment, device_of(self.given).hex(), number, message, digest))

    def hear(self, number, wait_s=0.0):
        return self.desk.ask(AwaitMessage(self.given.assignment, number, wait_s))

    def answer(self, message):
        answer = self.client.receive(message).message
        self.say(answer[0], answer)

    def advertise(self):
        self.answer(self.given.secagg)

    def share(self):
        self.answer(self.hear(2))

    def open(self):
        self.answer(self.hear(4))

    def upload(self):
        self.answer(self.hear(6))

    def confirm(self):
        self.answer(self.hear(8))

    def reveal(self):
        self.answer(self.hear(10))

    def result(self):
        self.client.receive(self.hear(12))
        return self.client.result


PHASES = ("advertise", "share", "open", "upload", "confirm", "reveal")


def seat(desk, names=NAMES, deltas=None):
    deltas = deltas or {name: [0.5, -0.25, 0, 1] for name in names}
    assigned = desk.assign(*names)
    return [Device(desk, given, deltas[name], weight=2) for given, name in zip(assigned, names, strict=True)]


def run(devices, phases=PHASES):
    for phase in phases:
        for device in devices:
            getattr(device, phase)()


def test_a_secure_task_waits_where_there_is_no_authority_and_says_so(store, register):
    task = register(**SECURE)
    desk = Desk(store, authority=None)
    for name in NAMES:
        desk.wait(name)
    found = store.task(task)
    assert (found.state, "muster authority serve" in found.reason) == (TaskState.PAUSED, True)
    assert store.rounds(task) == []


def test_a_secure_round_commits_the_mean_of_what_devices_masked(store, register, desk):
    task = register(**SECURE)
    deltas = {name: [number / 8, -number / 4, 0, 1] for number, name in enumerate(NAMES)}
    devices = seat(desk, deltas=deltas)
    run(devices)
    expected = START + np.mean(list(deltas.values()), axis=0)
    step = 2 * 4.0 / (2**20 - 1) * 10 / 2
    np.testing.assert_allclose(store.checkpoint(task, 1)["params"], expected, atol=step)
    assert store.rounds(task)[0].reported == 8
    cohort = store.cohort(task, 1)
    assert {one.state for one in cohort} == {AssignmentState.REPORTED}
    uploads = {device.given.assignment: hashlib.sha256(device.said[7]).hexdigest() for device in devices}
    assert {one.id: one.report_sha256 for one in cohort} == uploads
    assert all(device.result().summed for device in devices)


def test_a_device_that_takes_weight_from_the_rest_makes_no_sum(store, register, desk, monkeypatch):
    """Divided by the weight that one device leaves of all, the mean would be as long as that device likes."""
    task = register(**SECURE)
    liar, *honest = seat(desk)
    run([liar, *honest], PHASES[:3])
    run(honest, ("upload",))
    encode = packing.encode

    def light(*given):
        words = encode(*given)
        words[:1] -= np.uint64(2 * len(NAMES) - len(NAMES) + 1)
        words[-1] = packing._check_word(words[:-1])
        return words

    with monkeypatch.context() as patched:
        patched.setattr(packing, "encode", light)
        liar.upload()
    run([liar, *honest], PHASES[4:])
    [attempt, *_] = store.rounds(task)
    assert (attempt.state.value, attempt.reason) == ("abandoned", "sum-out-of-range")


def test_metrics_of_a_secure_round_are_means_of_exact_sums(store, register, desk):
    task = register(**SECURE)
    devices = [Device(desk, given, [0, 0, 0, 0], weight=4, loss=2.125) for given in desk.assign(*NAMES)]
    run(devices)
    assert store.rounds(task)[0].metrics == {"train.loss": 2.125 / 4}


def test_messages_that_were_answered_are_kept_only_for_restarts(register, desk):
    register(**SECURE)
    devices = seat(desk)
    run(devices, ("advertise", "share"))
    assert devices[0].hear(4)
    run(devices, ("open", "upload", "confirm"))
    for number in (2, 4, 6):
        with pytest.raises(errors.NoLongerNeeded):
            devices[0].hear(number)
    assert devices[0].hear(8)
    assert devices[0].hear(10)


def test_an_invitation_states_the_rounds_terms(register, desk):
    register(**LENIENT)
    given = seat(desk, [f"e{number}" for number in range(10)])[0].given
    invite, _ = Invite.decode(given.secagg)
    assert (invite.n_max, invite.min_sum, invite.w_max, invite.round) == (10, 8, 10, 1 << 32 | 1)
    metrics = (2, False, 0.0)
    assert [(one.size, one.weighted, one.norm) for one in invite.segments] == [(4, True, 4.0), metrics, metrics]
    assert given.report_within_s == 600.0


def test_a_device_that_repeats_a_message_has_one_listener(register, desk):
    register(**SECURE)
    device, *_ = seat(desk)
    message = device.client.receive(device.given.secagg).message
    digest, listeners = hashlib.sha256(message).hexdigest(), []
    for _ in range(3):
        listeners.append(Future())
        key = device_of(device.given).hex()
        desk.ask(PutMessage(device.given.assignment, key, 1, message, digest, 1000.0, listeners[-1]))
    assert [one.done() for one in listeners] == [True, True, False]
    assert listeners[0].result(timeout=0) is None


def test_the_same_message_again_changes_nothing_and_another_is_refused(register, desk):
    register(**SECURE)
    devices = seat(desk)
    run(devices, PHASES[:4])
    for device in devices[:2]:
        for number in (1, 3, 5, 7):
            assert device.say(number, device.said[number]) is None
        with pytest.raises(errors.ConflictingReport):
            device.say(7, b"\7another")
    run(devices, PHASES[4:])
    assert devices[0].say(11, devices[0].said[11]) is None
    assert devices[0].hear(8) is not None


def test_after_an_early_or_damaged_message_a_device_may_try_again(register, desk):
    register(**SECURE)
    devices = seat(desk)
    for number, message in ((3, b"\3"), (1, b"\1rubbish"), (1, b""), (1, b"\7")):
        with pytest.raises(errors.UnusableMessage):
            devices[0].say(number, message)
    run(devices, PHASES[:1])
    assert all(device.hear(2) for device in devices)


def test_a_device_hears_when_the_last_one_spoke_or_its_wait_is_over(register, desk):
    register(**SECURE)
    devices = seat(desk)
    run(devices[:-1], PHASES[:1])
    early, patient = desk.turn(
        AwaitMessage(devices[0].given.assignment, 2, 1.0), AwaitMessage(devices[1].given.assignment, 2, 9.0)
    )
    desk.pass_time(2)
    assert early.result(timeout=0) is None
    assert not patient.done()
    devices[-1].advertise()
    assert patient.result(timeout=0)[0] == 2


def test_training_ends_five_phases_before_the_reporting_deadline(store, register, desk):
    task = register(**LENIENT | {"reporting_deadline_s": 60.0})
    devices = seat(desk, [f"e{number}" for number in range(10)])
    assert devices[0].given.report_within_s == 60.0
    run(devices[:8], PHASES[:1])
    desk.pass_time(34)
    assert devices[0].hear(2) is None
    desk.pass_time(1)
    run(devices[:8], PHASES[1:])
    assert states(store, task) == ["committed"]


@pytest.mark.parametrize("phase", range(1, 6))
def test_a_device_that_falls_silent_is_left_out_and_the_round_commits(store, register, desk, phase):
    task = register(**LENIENT)
    names = [f"e{number}" for number in range(10)]
    devices = seat(desk, names, {name: [number, 0, 0, 0] for number, name in enumerate(names)})
    run(devices, PHASES[:phase])
    run(devices[1:], PHASES[phase : phase + 1])
    assert states(store, task)[-1] == "reporting"
    desk.pass_time(5.0)
    run(devices[1:], PHASES[phase + 1 :])
    assert states(store, task)[-1] == "committed"
    counted = [one.device for one in store.cohort(task, 1) if one.state is AssignmentState.REPORTED]
    # Every device that sent a masked report is in the sum, even if it was not heard of again.
    assert len(counted) == (9 if phase < 4 else 10)
    if phase < 4:
        with pytest.raises(errors.NoLongerNeeded):
            getattr(devices[0], PHASES[phase])()


@pytest.mark.parametrize("phase", range(6))
def test_below_the_threshold_the_attempt_is_abandoned_and_tried_again(store, register, desk, phase):
    task = register(**SECURE)
    devices = seat(desk)
    run(devices, PHASES[:phase])
    few = devices[: 0 if phase == 5 else 4]
    for device in few:
        getattr(device, PHASES[phase])()
    for _ in range(6):
        desk.pass_time(600 if phase == 0 else 5)
    assert [one.reason for one in store.rounds(task)] == ["too-few-reports"]
    assert all(one.state is not AssignmentState.REPORTED for one in store.cohort(task, 1))
    # No share was released: nobody was asked for any before phase 5, and there nobody answered.
    assert all(11 not in device.said for device in devices)
    again = seat(desk, [f"again{number}" for number in range(8)])
    run(again)
    assert [one.state for one in store.rounds(task)] == ["abandoned", "committed"]


def test_a_device_that_gives_up_is_not_waited_for(store, register, desk):
    task = register(**LENIENT)
    devices = seat(desk, [f"e{number}" for number in range(10)])
    run(devices, PHASES[:1])
    desk.give_up(devices[0].given)
    run(devices[1:], PHASES[1:])
    assert states(store, task) == ["committed"]
    with pytest.raises(errors.ConflictingReport):
        desk.give_up(devices[1].given)


def test_a_goal_of_devices_that_trained_need_not_wait_long_for_the_others(store, register, desk):
    task = register(**SECURE | {"over_selection": 1.25})
    devices = seat(desk, [f"e{number}" for number in range(10)])
    run(devices[:8], PHASES[:1])
    assert devices[0].hear(2) is None
    desk.pass_time(5)
    run(devices[:8], PHASES[1:])
    assert states(store, task) == ["committed"]
    with pytest.raises(errors.NoLongerNeeded):
        devices[9].advertise()


def test_a_restart_abandons_the_attempt_and_wants_no_more_messages(store, register, desk, new_desk):
    task = register(**SECURE)
    devices = seat(desk)
    run(devices, PHASES[:4])
    later = new_desk()
    with pytest.raises(errors.NoLongerNeeded):
        later.ask(AwaitMessage(devices[0].given.assignment, 8, 0.0))
    assert [one.reason for one in store.rounds(task)] == ["driver-lost"]


def test_a_coordinator_that_stops_does_not_let_devices_wait(register, desk):
    register(**SECURE)
    devices = seat(desk)
    run(devices[:-1], PHASES[:1])
    (waiting,) = desk.turn(AwaitMessage(devices[0].given.assignment, 2, 60.0))
    desk.driver.drain()
    desk.turn()
    with pytest.raises(errors.Unavailable):
        waiting.result(timeout=0)


def test_a_cancelled_task_releases_no_sum(store, register, desk):
    task = register(**SECURE)
    devices = seat(desk)
    run(devices, PHASES[:5])
    store.cancel(task)
    desk.pass_time(1)
    with pytest.raises(errors.NoLongerNeeded):
        devices[0].hear(10) and devices[0].reveal()
    assert not devices[0].result().summed
    assert states(store, task) == ["abandoned"]


def test_a_report_in_clear_is_refused(register, desk):
    register(**SECURE)
    device = seat(desk)[0]
    with pytest.raises(errors.InvalidReport):
        desk.report(device.given, [1, 0, 0, 0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"goal": 7}, "goal"),
        ({"goal": 20, "minimum": 7}, "minimum"),
        ({"goal": 8, "reporting_deadline_s": 150.0}, "reporting_deadline_s must be above 150 "),
    ],
)
def test_a_secure_task_that_is_too_small_or_too_short_is_refused(settings, named):
    with pytest.raises(errors.InvalidTask, match=named):
        TaskSettings(population="p", rounds=1, secagg=Secagg(), **settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_size": 15},
        {"group_size": 501},
        {"clip_norm": 0},
        {"bits": 1},
        {"bits": 21},
        {"max_examples": 0},
        {"phase_s": 0},
        {"clip_norm": float("nan")},
    ],
)
def test_secure_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(errors.InvalidTask, match=next(iter(wrong))):
        Secagg(**wrong)


@pytest.mark.parametrize("bits", [2, 16, 20])
@pytest.mark.parametrize("cohort", [20, 10_000])
def test_fields_are_as_narrow_as_the_sum_of_a_group_allows(register, desk, bits, cohort):
    settings = TaskSettings(population="p", rounds=1, goal=cohort, over_selection=1.0, secagg=Secagg(bits=bits))
    register(**SECURE)
    invite = invitation(settings, settings.policy, make_plan(), seat(desk)[0].given, 0)
    mean, largest = invite.segments[0], min(cohort, 200)
    assert largest * mean.most < 1 << mean.field_bits <= 2 * largest * mean.most


def states(store, task):
    return [one.state.value for one in store.rounds(task)]
