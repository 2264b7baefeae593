"""What a device checks alone before it waits, and that nobody hears of it."""

from dataclasses import replace

import numpy as np
import pytest

from device_runtime.capabilities import stated_examples
from device_runtime.conditions import Conditions
from device_runtime.examples import open_examples
from device_runtime.examples.database import Collection
from device_runtime.examples.store import ExampleStore
from device_runtime.permission.guard import acceptable_tasks
from device_runtime.session import run_session
from fedcore.plan import Field
from fedcore.wire.messages import Accepted, Offer, RetryWindow, Willing, encode
from tests.device_runtime.coordinator import answer

SHOWN = {"default"}.__contains__
PLUGGED = Conditions(charging=True, idle=True, unmetered=False, battery=0.5, free_storage_bytes=1000)


@pytest.fixture
def store(tmp_path):
    """Ten examples in collection "default", one a day old, one two days old, and so on."""
    now = 1e9
    held = ExampleStore.open(tmp_path / "examples", clock=lambda: now)
    held.declare(Collection("default", (Field("x", "float32", ()),)))
    for days in range(1, 11):
        held.append("default", {"x": 0.0}, at=now - days * 86_400)
    return held


def takes(store, **rules):
    return acceptable_tasks([Offer(task="t", collection="default", **rules)], store, PLUGGED, SHOWN) == ("t",)


@pytest.mark.parametrize(
    ("rules", "taken"),
    [
        ({}, True),
        ({"charging": True, "idle": True}, True),
        ({"unmetered": True}, False),
        ({"min_battery": 0.5}, True),
        ({"min_battery": 0.6}, False),
        ({"min_free_storage_bytes": 1001}, False),
        ({"min_examples": 10}, True),
        ({"min_examples": 11}, False),
        ({"min_examples": 11, "min_recent_examples": 3, "max_example_age_s": 3 * 86_400.0}, False),
        ({"min_recent_examples": 3, "max_example_age_s": 3 * 86_400.0}, True),
        ({"min_recent_examples": 4, "max_example_age_s": 3 * 86_400.0}, False),
    ],
)
def test_device_waits_for_a_task_whose_every_rule_it_knows_to_hold(store, rules, taken):
    assert takes(store, **rules) is taken


def test_condition_that_the_device_does_not_know_does_not_hold(store):
    assert acceptable_tasks([Offer(task="t", collection="default", charging=True)], store, Conditions(), SHOWN) == ()


def test_examples_without_a_time_are_never_recent(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros(5, np.float32))
    source = open_examples(tmp_path / "mine.npz")
    assert takes(source, min_examples=5)
    assert not takes(source, min_recent_examples=1, max_example_age_s=1e9)


def offered(coordinator, *offers):
    coordinator.faults["check-in"] = [answer(encode(Accepted("s-1", offers, RetryWindow(70, 80))))]


def test_device_says_which_tasks_it_is_willing_for(coordinator, config):
    offered(
        coordinator,
        Offer(task="t-0", collection="default", idle=True),
        Offer(task="t-1", collection="default"),
    )
    assert run_session(replace(config, conditions=lambda: Conditions(idle=False))).outcome == "reported"
    assert coordinator.willing == [Willing(tasks=("t-1",))]


def test_device_states_no_exact_number_of_examples(coordinator, config):
    path = config.examples
    for held, stated in ((1, 1), (7, 4), (1000, 512)):
        np.savez(path, x=np.zeros((held, 2), np.float32), y=np.zeros(held, np.float32))
        run_session(config)
        assert coordinator.checkins[-1].examples == {"default": stated}


def test_device_with_many_collections_names_those_with_most_examples():
    counts = {f"collection {number}": number for number in range(100)} | {"long " * 50: 1000}
    stated = stated_examples(counts)
    assert min(stated.values()) == 32
    assert len(stated) == 64
    assert max(map(len, stated)) <= 200


def test_device_willing_for_nothing_comes_back_in_the_window(coordinator, config):
    offered(coordinator, Offer(task="t-1", collection="default", min_battery=0.9))
    outcome = run_session(replace(config, conditions=lambda: Conditions(battery=0.2)))
    assert (outcome.outcome, outcome.reason, outcome.retry) == ("rejected", "unwilling", RetryWindow(70, 80))
    assert coordinator.calls == ["check-in"]


def test_device_that_reported_comes_back_in_the_window_of_its_check_in(coordinator, config):
    offered(coordinator, Offer(task="t-1", collection="default"))
    assert run_session(config).retry == RetryWindow(70, 80)
