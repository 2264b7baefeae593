"""Devices ask before they report, and examples that a plan holds out."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from time import monotonic, sleep

import httpx2
import pytest

from coordinator.errors import InvalidTask
from coordinator.rules.entities import Regularly
from coordinator.rules.progress import OBSTACLES
from coordinator.rules.selection import Capabilities, DeviceHoldOut, Needs
from coordinator.rules.states import AssignmentState, Requires
from coordinator.rules.task_settings import TaskSettings
from fedcore.batching import is_held_out
from fedcore.wire.messages import Rejected
from tests.coordinator.bundles import START, make_bundle, make_evaluation_bundle, report_body
from tests.coordinator.test_api import assign, refused

LONG_S = 4
PATIENCE_S = 30.0


def hold(client, given, seconds=LONG_S, **how):
    path = f"/v1/assignments/{given.assignment}"
    auth = client.devices.owner(given.assignment)
    return client.get(path, headers={"Prefer": f"wait={seconds}"}, auth=auth, **how)


def report(client, given):
    path = f"/v1/assignments/{given.assignment}/report"
    body = report_body([1, 0, 0, 0], 1.0)
    headers = {"Content-Type": "application/octet-stream"}
    return client.put(path, content=body, headers=headers, auth=client.devices.owner(given.assignment))


def test_request_is_held_as_long_as_asked_while_the_report_is_needed(register, client):
    register(goal=1)
    (given,) = assign(client, "a")
    assert given.lost_after_s == pytest.approx(5.01)
    assert not given.over_selected
    answer = hold(client, given, 1)
    assert (answer.status_code, answer.headers["preference-applied"], answer.content) == (204, "wait=1", b"")
    assert answer.elapsed.total_seconds() >= 1
    assert hold(client, given, 0).status_code == 204


def test_device_that_is_one_too_many_hears_it_at_once(register, client):
    register(goal=1, over_selection=2)
    quick, spare = assign(client, "a", "b")
    assert spare.over_selected
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold, client, spare)
        sleep(0.3)
        assert report(client, quick).status_code == 200
        refused(held.result(timeout=PATIENCE_S), "no-longer-needed")  # a hold that lasts its time ends with 204
    refused(hold(client, spare, 0), "no-longer-needed")
    refused(hold(client, quick, 0), "no-longer-needed")


def test_only_the_device_that_was_given_an_assignment_may_hold_it(register, client):
    register(goal=1)
    (given,) = assign(client, "a")
    path = f"/v1/assignments/{given.assignment}"
    refused(client.get(path, auth=client.devices["b"]), "foreign-assignment")
    refused(client.get("/v1/assignments/nobody", auth=client.devices["b"]), "unknown-assignment")


def until_lost(store, task, slot):
    """Wait until a device is lost."""
    until = monotonic() + PATIENCE_S
    while store.cohort(task, 1)[slot].state is not AssignmentState.LOST:
        assert monotonic() < until
        sleep(0.05)


def test_connection_that_breaks_frees_the_place_of_its_device_alone(store, register, client):
    task = register(goal=2)
    here, gone = assign(client, "a", "b")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold, client, here, LONG_S)
        with pytest.raises(httpx2.ReadTimeout):
            hold(client, gone, timeout=0.3)
        until_lost(store, task, gone.slot)
        assert held.result().status_code in (204, 410)
    refused(report(client, gone), "no-longer-needed")


def test_device_that_says_nothing_is_lost(store, register, client):
    task = register(goal=1)
    (given,) = assign(client, "a")
    until_lost(store, task, given.slot)
    refused(hold(client, given, 0), "no-longer-needed")


SHARE = 0.3
ABLE = Capabilities(frozenset({"onnx"}), {"default": 10})


def device(*, held_out, share=SHARE, population="phones"):
    """The id of a device on one side."""
    ids = (hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in count())
    return next(one for one in ids if is_held_out(population, one, share) == held_out)


OUT, IN = device(held_out=True), device(held_out=False)


@pytest.mark.parametrize(("on_held_out", "drawn", "away"), [(False, IN, OUT), (True, OUT, IN)])
def test_a_task_runs_on_one_side_of_its_population(register, desk, on_held_out, drawn, away):
    task = register(goal=1, hold_out_devices=SHARE, on_held_out=on_held_out)
    rejected = desk.arrive(away)
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.formats) == ("not-eligible", ())
    (given,) = desk.assign(drawn)
    assert given.task == task


def test_a_held_out_device_is_drawn_for_other_tasks_and_not_for_this_one(store, register, desk):
    other, apart = register(goal=2), register(goal=1, hold_out_devices=SHARE)
    assert {offer.task for offer in desk.arrive(OUT).offers} == {other}
    waiting = desk.wait(OUT)
    assert {offer.task for offer in desk.arrive(IN).offers} == {other, apart}
    assert not waiting.done()
    assert store.rounds(apart) == []


@pytest.mark.parametrize(("on_held_out", "away", "obstacle"), [(False, OUT, "held-out"), (True, IN, "not-held-out")])
def test_progress_names_the_hold_out_as_the_reason(store, register, desk, on_held_out, away, obstacle):
    task = register(goal=1, hold_out_devices=SHARE, on_held_out=on_held_out)
    desk.turn()
    for _ in range(3):
        desk.arrive(away)
    desk.pass_time(61)
    assert store.progress_of(task).sentence.endswith(f"3 check-ins were rejected lately: 3 {OBSTACLES[obstacle]}")


def test_a_device_on_the_other_side_is_told_no_format_and_no_rule_to_meet():
    hold_out = DeviceHoldOut("phones", SHARE, on_held_out=False)
    needs = Needs(frozenset({"executorch"}), "default", 5, Requires(), hold_out)
    assert [needs.unmet_by(one, ABLE) for one in (OUT, IN)] == ["held-out", "format"]
    assert needs.unmet_by(OUT, Capabilities(frozenset({"onnx"}), {})) == "examples"


def test_the_population_is_the_salt_and_the_task_is_not():
    tablets = Needs(frozenset({"onnx"}), "default", 1, hold_out=DeviceHoldOut("tablets", SHARE, on_held_out=False))
    moved = next(
        one
        for one in (hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in count())
        if is_held_out("phones", one, SHARE) and not is_held_out("tablets", one, SHARE)
    )
    assert tablets.unmet_by(moved, ABLE) == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hold_out_devices": 1}, "hold_out_devices must be a number, at least 0 and below 1, not 1"),
        ({"hold_out_devices": -0.1}, "hold_out_devices must be a number, at least 0 and below 1, not -0.1"),
        ({"hold_out_devices": float("nan")}, "hold_out_devices must be a number, at least 0 and below 1, not nan"),
        ({"on_held_out": True}, "on_held_out must be false without hold_out_devices: no device is held out, not True"),
    ],
)
def test_a_hold_out_that_cannot_be_is_refused_by_name(given, words):
    with pytest.raises(InvalidTask, match=f"^{words}"):
        TaskSettings(population="phones", goal=1, rounds=1, **given)


@pytest.fixture
def train(store, register, desk, tmp_path):
    """Trains from a model, or anew, in a task with the settings given; answers its id and the model."""

    def trained(start=START, **settings):
        bundle = make_bundle(tmp_path / str(start), start=start)
        task = register(bundle, goal=1, rounds=1, **settings)
        desk.pass_time(60)
        (given,) = desk.assign(device(held_out=settings.get("on_held_out", False), share=settings["hold_out_devices"]))
        desk.report(given, (1, 2, 3, 4))
        return task, store.checkpoint(task, 1)["params"]

    return trained


@pytest.fixture
def begin(register, tmp_path):
    """Registers a task that starts from a model."""
    return lambda start, **settings: register(make_bundle(tmp_path / f"{start}", start=start), goal=1, **settings)


def test_a_descendant_holds_out_no_fewer_devices_than_what_it_starts_from(train, begin):
    parent, model = train(hold_out_devices=0.2)
    for share in (0, 0.1):
        with pytest.raises(
            InvalidTask, match=rf"hold_out_devices must be at least 0.2, .* task {parent} .*, not {share}"
        ):
            begin(model, hold_out_devices=share)
    assert all(begin(model, hold_out_devices=share) for share in (0.2, 0.5))
    assert begin(model, population="tablets")  # whose hold-out is another one


def test_no_task_runs_on_held_out_devices_that_trained_its_model(train, begin):
    parent, model = train(hold_out_devices=0.2)
    with pytest.raises(InvalidTask, match=rf"hold_out_devices must be at most 0.2, .* task {parent} .*, not 0.3"):
        begin(model, hold_out_devices=0.3, on_held_out=True)
    assert all(begin(model, hold_out_devices=share, on_held_out=True) for share in (0.1, 0.2))


def test_devices_that_trained_an_earlier_ancestor_are_not_held_out(train, begin):
    first, model = train(hold_out_devices=0.1)
    _, grown = train(model, hold_out_devices=0.3)
    with pytest.raises(InvalidTask, match=rf"hold_out_devices must be at most 0.1, .* task {first} .*, not 0.3"):
        begin(grown, hold_out_devices=0.3, on_held_out=True)
    assert begin(grown, hold_out_devices=0.1, on_held_out=True)


def test_no_regular_evaluation_runs_on_devices_that_trained_an_ancestor(store, train, tmp_path):
    parent, model = train(hold_out_devices=0.2)
    bundle, regular = make_bundle(tmp_path / "child", start=model), Regularly(1, make_evaluation_bundle(tmp_path / "e"))

    def begin(share):
        settings = TaskSettings(population="phones", goal=1, rounds=1, hold_out_devices=share)
        return store.register_task(bundle, settings, evaluation=regular)

    for share, words in ((0.3, "at most"), (0.1, "at least")):
        with pytest.raises(
            InvalidTask, match=rf"hold_out_devices must be {words} 0.2, .* task {parent} .*, not {share}"
        ):
            begin(share)
    assert begin(0.2)


def test_a_model_that_held_out_devices_trained_has_none_apart(train, begin):
    parent, model = train(hold_out_devices=0.2, on_held_out=True)
    with pytest.raises(InvalidTask, match=rf"hold_out_devices must be at most 0, .* task {parent} .*, not 0.2"):
        begin(model, hold_out_devices=0.2, on_held_out=True)
    assert begin(model)


def test_a_task_that_leaves_the_model_as_it_is_has_no_descendants(store, register, desk, begin):
    measured = register(goal=1, rounds=1, hold_out_devices=0.2, on_held_out=True)
    (given,) = desk.assign(device(held_out=True, share=0.2))
    desk.report(given, (0, 0, 0, 0))
    assert (store.checkpoint(measured, 1)["params"] == START).all()
    assert begin(START)
    assert begin(START, hold_out_devices=0.5, on_held_out=True)
