"""Tasks for devices whose labels match: who is offered them, what devices are told, and how many match."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec import UNSET

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import TaskSettings
from fedcore.release import decode_release
from fedcore.wire.messages import Rejected
from tests.coordinator.test_notices import Pair, away
from tests.coordinator.test_release import SETTINGS as SECURE, sign

EU = {"app_version": "3.10.1", "region": "eu"}
US = {"app_version": "3.10.1", "region": "us"}
WHERE = "app_version>=3.2 and region in (eu, uk)"
CANONICAL = "app_version >= 3.2 and region in (eu, uk)"


@pytest.mark.every_engine
def test_a_device_is_offered_the_tasks_alone_that_its_labels_match(store, register, desk):
    task, other = register(goal=1, where=WHERE), register(goal=2, where="region = us")
    assert {offer.task for offer in desk.arrive("a", labels=EU).offers} == {task}
    assert {offer.task for offer in desk.arrive("b", labels=US).offers} == {other}
    given = desk.wait("a", labels=EU).result(timeout=0)
    assert (given.task, given.target) == (task, CANONICAL)
    assert store.task(task).settings.where == CANONICAL
    created = [entry.detail for entry in store.audit() if entry.subject == task]
    assert created[-1].endswith(f"; where {CANONICAL}")


def test_a_device_that_tells_no_labels_matches_no_target(store, register, desk):
    task = register(goal=1, where="not region = eu")
    rejected = desk.arrive("a")
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "not-eligible"
    desk.pass_time(15)
    assert "1 whose labels do not match" in store.progress_of(task).sentence
    untargeted = register(goal=1)
    desk.pass_time(1)
    assert desk.wait("b").result(timeout=0).target is UNSET
    assert store.task(untargeted).settings.where == ""


def test_labels_that_no_task_asks_for_are_kept_of_no_device_that_waits(register, desk):
    register(goal=2, where="region = eu")
    desk.wait("a", labels=EU | {"tier": "gold"})
    (session,) = desk.driver._memory.sessions.waiting()
    assert session.eligibility.capabilities.labels == {"region": "eu"}


def test_a_replica_that_follows_turns_away_whom_the_target_leaves_out(store, register):
    register(goal=1, where="region = eu")
    (other,) = Pair(store).others
    assert away(other).reason == "not-eligible"
    assert away(other, "b", labels=EU) is None


def test_the_release_of_a_secure_task_bounds_its_target(store, bundle, desk):
    targeted = dataclasses.replace(SECURE, where=WHERE)
    release = sign(bundle, targeted)
    assert decode_release(release.text).bounds.target == CANONICAL
    assert "target" not in sign(bundle).text
    with pytest.raises(InvalidTask, match="bounds of the release"):
        store.register_task(bundle, targeted, sign(bundle))
    store.register_task(bundle, targeted, release)
    given = [desk.wait(f"d{number}", labels=EU) for number in range(SECURE.goal)]
    assert {one.result(timeout=0).target for one in given} == {CANONICAL}


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("region == eu", "where must be an expression on labels; column 8: there is no operator `==`"),
        ("app_version >= new", "where must be an expression on labels; column 16: here must be a version"),
        ("a = 1 and " * 101 + "a = 1", "where must be an expression on labels; column 1001: "),
        ("(" * 20 + "a = 1" + ")" * 20, "where must be an expression on labels; column 17: more than 16"),
    ],
)
def test_a_target_that_does_not_parse_is_refused_with_the_place(where, words):
    with pytest.raises(InvalidTask) as refused:
        TaskSettings(population="phones", goal=1, rounds=1, where=where)
    assert words in str(refused.value)
