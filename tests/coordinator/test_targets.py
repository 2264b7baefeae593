"""Tasks for devices whose labels match: who is offered them, what devices are told, and how many match."""

from __future__ import annotations

import dataclasses

import httpx2
import pytest
from msgspec import UNSET

import muster
from coordinator.api.authentication import issue
from coordinator.api.service import SPAN_S, CheckInCounts
from coordinator.errors import InvalidTask
from coordinator.rules.budget import PopulationBudget
from coordinator.rules.entities import Role
from coordinator.rules.selection import Matching
from coordinator.rules.task_settings import TaskSettings
from fedcore.release import decode_release
from fedcore.wire import messages
from fedcore.wire.messages import CheckIn, Rejected
from muster.remote import RemoteStore
from tests.coordinator.browser import chromium, shows
from tests.coordinator.devices import CAPABILITIES, speaking_to
from tests.coordinator.pages import log_in
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


KINDS = {(("region", "eu"),): 7, (("app_version", "3.1"), ("region", "us")): 4, (): 5, (("odd", "x"),): 1}


@pytest.mark.parametrize(
    ("where", "least", "sentence", "concerns"),
    [
        ("region = eu", 1, "7 of 19 devices that came within a day match; 5 tell no labels", []),
        ("", 1, "17 of 19 devices", []),
        ("region = us", 1, "4 of 19", ["4 devices match, and the goal is 6"]),
        (
            "tier = gold or region = eu",
            1,
            "7 of 19",
            ["no device told a label tier within a day; they tell app_version, odd, region"],
        ),
        (
            "region = us or odd = x",
            4,
            "at least 4 of at least 16 devices that came within a day match; at least 4 tell no labels",
            [
                "no device told a label odd within a day; they tell app_version, region",
                "at least 4 devices match, and the goal is 6",
            ],
        ),
        ("odd != y", 4, "fewer than 4 of at least 16", ["no device told a label odd", "fewer than 4 devices match"]),
    ],
)
def test_matches_are_counted_and_what_is_odd_about_a_target_is_said(where, least, sentence, concerns):
    found = Matching.of(where, KINDS, 2, least)
    assert found.sentence.startswith(sentence)
    assert found.sentence.endswith("; the labels of 2 are not counted") is (least == 1)
    assert len(found.concerns(6)) == len(concerns)
    assert all(said.startswith(expected) for said, expected in zip(found.concerns(6), concerns, strict=True))


def test_without_labels_anywhere_a_target_says_so():
    assert Matching.of("region = eu", {(): 3}, 0, 1).concerns(1) == [
        "no device told a label region within a day; they tell none",
        "0 devices match, and the goal is 1",
    ]


def test_a_device_counts_once_with_the_labels_that_it_told_last(monkeypatch):
    monkeypatch.setattr("coordinator.api.service._MOST_LABEL_SETS", 3)
    counts = CheckInCounts()
    for number in range(5):
        counts.add("phones", f"device {number}", CAPABILITIES, 0.0, {"ring": f"r{number}"})
    for at, told in ((1.0, {"ring": "r1"}), (2.0, UNSET), (3.0, {"ring": "r2"})):
        counts.add("phones", "device 0", CAPABILITIES, at, told)
    counts.add("tablets", "device 0", CAPABILITIES, 3.0, {"ring": "r2"})
    found = counts.matching("phones", "ring in (r0, r2)", 1, 4.0)
    assert (found.devices, found.matching, found.untold, found.unkept) == (5, 2, 0, 2)
    assert counts.of("phones", 4.0).devices == 5
    gone = counts.matching("phones", "ring = r2", 1, 145 * SPAN_S)
    assert (gone.devices, gone.unkept, gone.labels) == (0, 0, ())
    assert counts.matching("nobody", "", 1, 0.0).devices == 0


def come(devices, name, labels):
    """A device checks in, whatever it is answered."""
    hello = CheckIn(capabilities=CAPABILITIES, examples={"default": 10}, labels=labels or UNSET)
    path = "/v1/populations/phones/checkins"
    assert devices.post(path, content=messages.encode(hello), auth=devices.devices[name]).status_code == 200


@pytest.fixture
def told(store, register, served):
    """A coordinator to which devices told labels, and an operator's token."""
    register(goal=9)
    with speaking_to(served.devices) as devices:
        for name, labels in {"a": EU, "b": EU, "c": US, "d": {}}.items():
            come(devices, name, labels)
    return served, issue(store.database, "olga", Role.OPERATOR)[1]


def test_an_operator_hears_how_many_match_and_is_warned_at_creation(store, bundle, told):
    urls, token = told
    with RemoteStore(urls.admin, token) as remote:
        found = remote.matching("phones", WHERE)
        assert (found.where, found.devices, found.matching, found.untold) == (CANONICAL, 4, 2, 1)
        assert found.labels == ("app_version", "region")
        with store.database.writing() as records:
            records.budgets.set("phones", PopulationBudget(epsilon=9.0, delta=1e-9, minimum_devices=3))
        assert remote.matching("phones", WHERE).sentence.startswith("fewer than 3 of at least 3 devices")
        with store.database.writing() as records:
            records.budgets.set("phones", None)
        with pytest.raises(InvalidTask, match="column 8: there is no operator"):
            remote.matching("phones", "region == eu")
    with muster.Coordinator(urls.admin, token) as coordinator:
        made = coordinator.create(bundle, population="phones", goal=2, rounds=1, where=WHERE)
        assert made.facts.settings.where == CANONICAL
        with pytest.warns(UserWarning, match="2 devices match, and the goal is 3") as warned:
            coordinator.create(bundle, population="phones", goal=3, rounds=1, where=WHERE)
        assert [one.filename for one in warned] == [__file__]


def test_who_is_limited_to_another_population_hears_of_no_device_here(store, told):
    tokens = {
        name: issue(store.database, "olga", Role.OPERATOR, populations=[name])[1] for name in ("phones", "watches")
    }
    found, pages = {}, {}
    for name, token in tokens.items():
        with RemoteStore(told[0].admin, token) as remote:
            found[name] = remote.matching("phones", WHERE), remote.matching("nobodys", WHERE)
        with httpx2.Client(base_url=told[0].admin) as browser:
            log_in(browser, token)
            asked = "/new/matching?where=region=eu&population="
            pages[name] = browser.get(f"{asked}phones").text, browser.get(f"{asked}nobodys").text
    assert (found["phones"][0].matching, pages["phones"][0].startswith("2 of 4 devices")) == (2, True)
    assert (found["watches"][0], pages["watches"][0]) == (found["watches"][1], pages["watches"][1])
    assert found["watches"][0].devices == 0


def test_the_form_counts_the_devices_that_match_as_its_operator_types(told):
    urls, token = told
    with chromium() as browser:
        browser.get(f"{urls.admin}/login")
        browser.find_element("name", "token").send_keys(token)
        browser.find_element("css selector", "main form button").click()
        shows(browser, "New task")
        browser.get(f"{urls.admin}/new")
        for name, words in {"population": "phones", "goal": "3"}.items():
            browser.find_element("id", name).send_keys(words)
        browser.execute_script("document.querySelector('#where').closest('details').open = true")
        field = browser.find_element("id", "where")
        field.send_keys("region = eu")
        shows(browser, "2 of 4 devices that came within a day match; 1 tell no labels", "and the goal is 3.")
        field.send_keys(" or tier >= gold")
        shows(browser, "where must be an expression on labels; column 24: here must be a version")


def test_the_form_tells_matches_to_operators_alone(store, locked):
    assert locked.get("/new/matching?where=a=1").status_code == 401
    log_in(locked, issue(store.database, "victor", Role.VIEWER)[1])
    assert locked.get("/new/matching?where=a=1").status_code == 403


def test_pages_and_commands_say_in_words_whom_a_task_runs_on(store, register, served):
    task = register(where=WHERE)
    words = "runs on devices whose app_version is at least 3.2 and region is one of eu, uk"
    assert words in httpx2.get(f"{served.admin}/tasks/{task}").text
