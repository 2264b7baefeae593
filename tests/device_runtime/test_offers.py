"""What a device offers, and how it enrols."""

import datetime as dt
from dataclasses import replace

import numpy as np
import pytest

from authority.attestation import AndroidPhones, Attestation
from device_runtime import Device
from device_runtime.capabilities import stated_examples
from device_runtime.conditions import Conditions
from device_runtime.errors import ConfigError, KeyUnavailable
from device_runtime.examples import open_examples
from device_runtime.examples.database import Collection
from device_runtime.examples.store import ExampleStore
from device_runtime.permission.guard import acceptable_tasks
from device_runtime.session import run_session
from device_runtime.state.records import read_journal
from fedcore.plan import Field
from fedcore.wire import messages
from tests.authority.android import Maker
from tests.device_runtime.coordinator import answer, refusal

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
    return acceptable_tasks([messages.Offer(task="t", collection="default", **rules)], store, PLUGGED, SHOWN) == ("t",)


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
    assert (
        acceptable_tasks([messages.Offer(task="t", collection="default", charging=True)], store, Conditions(), SHOWN)
        == ()
    )


def test_examples_without_a_time_are_never_recent(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros(5, np.float32))
    source = open_examples(tmp_path / "mine.npz")
    assert takes(source, min_examples=5)
    assert not takes(source, min_recent_examples=1, max_example_age_s=1e9)


def offered(coordinator, *offers):
    coordinator.faults["check-in"] = [
        answer(messages.encode(messages.Accepted("s-1", offers, messages.RetryWindow(70, 80))))
    ]


def test_device_says_which_tasks_it_is_willing_for(coordinator, config):
    offered(
        coordinator,
        messages.Offer(task="t-0", collection="default", idle=True),
        messages.Offer(task="t-1", collection="default"),
    )
    assert run_session(replace(config, conditions=lambda: Conditions(idle=False))).outcome == "reported"
    assert coordinator.willing == [messages.Willing(tasks=("t-1",))]


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
    offered(coordinator, messages.Offer(task="t-1", collection="default", min_battery=0.9))
    outcome = run_session(replace(config, conditions=lambda: Conditions(battery=0.2)))
    assert (outcome.outcome, outcome.reason, outcome.retry) == ("rejected", "unwilling", messages.RetryWindow(70, 80))
    assert coordinator.calls == ["check-in"]


def test_device_that_reported_comes_back_in_the_window_of_its_check_in(coordinator, config):
    offered(coordinator, messages.Offer(task="t-1", collection="default"))
    assert run_session(config).retry == messages.RetryWindow(70, 80)


SECRET = b"a secret of the whole fleet"


def test_a_device_enrols_at_its_first_session_and_stays_who_it_is(coordinator, config):
    first, second = run_session(config), run_session(config)
    assert (first.outcome, first.device) == ("reported", "d-0")
    assert second.device == first.device
    (message,) = coordinator.enrolments
    assert message.attestation == messages.Unattested()


def test_a_device_that_the_coordinator_forgot_enrols_again_and_goes_on(coordinator, config):
    run_session(config)
    coordinator.faults["check-in"] = [refusal("unknown-device")]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.device) == ("reported", "d-1")
    assert len(coordinator.enrolments) == 2
    assert run_session(config).device == "d-1"


def test_an_id_that_no_signature_can_name_is_refused_and_not_kept(coordinator, config):
    coordinator.faults["enrol"] = [answer(messages.encode(messages.Enrolled("d\n0", None)))]
    outcome = run_session(config)
    assert (outcome.reason, "no signature can name" in outcome.detail) == ("bad-answer", True)
    assert run_session(config).outcome == "reported"


def test_another_key_is_another_device(coordinator, config):
    run_session(config)
    (config.state / "device-key").unlink()
    assert run_session(config).device == "d-1"


def test_a_device_with_a_secret_proves_it_and_never_sends_it(coordinator, config):
    run_session(replace(config, enrolment_secret=SECRET))
    (message,) = coordinator.enrolments
    assert isinstance(message.attestation, messages.SharedSecret)
    key, created = coordinator.keys["d-0"], coordinator.created["d-0"]
    assert message.attestation.proof == messages.shared_secret_proof(SECRET, key, created)
    assert Attestation(False, SECRET).check(message.attestation, key, created) == "shared-secret"
    assert SECRET.decode() not in repr(replace(config, enrolment_secret=SECRET))


def test_an_application_may_name_the_file_with_the_secret(coordinator, config, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    given = {"coordinator": config.coordinator, "population": "phones", "examples": config.examples}
    Device(**given, state=config.state, enrolment_secret=tmp_path / "secret").run_once()
    (message,) = coordinator.enrolments
    assert message.attestation.proof == messages.shared_secret_proof(
        SECRET, coordinator.keys["d-0"], coordinator.created["d-0"]
    )
    with pytest.raises(ConfigError, match="missing"):
        Device(**given, state=config.state, enrolment_secret=tmp_path / "missing")


def test_a_device_shows_what_its_platform_attests_for_its_key(coordinator, config, tmp_path):
    maker = Maker(dt.datetime.now(dt.UTC))
    run_session(replace(config, attest=lambda challenge: messages.AndroidKey(maker.chain(challenge))))
    (message,) = coordinator.enrolments
    attestation = Attestation(False, phones=AndroidPhones.load(maker.settings(tmp_path)))
    key, created = coordinator.keys["d-0"], coordinator.created["d-0"]
    assert attestation.check(message.attestation, key, created) == "android-key"


def test_a_platform_that_cannot_attest_now_ends_the_session(coordinator, config):
    def attest(challenge):
        raise KeyUnavailable("the phone has not been unlocked yet")

    outcome = run_session(replace(config, attest=attest))
    assert (outcome.outcome, outcome.reason) == ("failed", "key-unavailable")
    assert coordinator.enrolments == []


def test_a_device_that_is_not_enrolled_says_why_and_goes_away_for_hours(coordinator, config):
    coordinator.faults["enrol"] = [refusal("not-attested", "this coordinator takes no device without an attestation")]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("failed", "not-attested", "permanent")
    assert outcome.device == ""
    assert coordinator.calls == []
    assert read_journal(config.state)[-1].reason == "not-attested"
