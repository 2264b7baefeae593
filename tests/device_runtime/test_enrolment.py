"""How a device becomes known to a coordinator, and known again."""

import datetime as dt
from dataclasses import replace

import pytest

from authority.attestation import AndroidPhones, Attestation
from device_runtime import Device
from device_runtime.errors import ConfigError, KeyUnavailable
from device_runtime.session import run_session
from device_runtime.state.journal import read_journal
from fedcore.wire.messages import AndroidKey, Enrolled, SharedSecret, Unattested, encode, shared_secret_proof
from tests.authority.android import Maker
from tests.device_runtime.coordinator import answer, refusal

SECRET = b"a secret of the whole fleet"


def test_a_device_enrols_at_its_first_session_and_stays_who_it_is(coordinator, config):
    first, second = run_session(config), run_session(config)
    assert (first.outcome, first.device) == ("reported", "d-0")
    assert second.device == first.device
    (message,) = coordinator.enrolments
    assert message.attestation == Unattested()


def test_a_device_that_the_coordinator_forgot_enrols_again_and_goes_on(coordinator, config):
    run_session(config)
    coordinator.faults["check-in"] = [refusal("unknown-device")]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.device) == ("reported", "d-1")
    assert len(coordinator.enrolments) == 2
    assert run_session(config).device == "d-1"


def test_an_id_that_no_signature_can_name_is_refused_and_not_kept(coordinator, config):
    coordinator.faults["enrol"] = [answer(encode(Enrolled("d\n0", None)))]
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
    assert isinstance(message.attestation, SharedSecret)
    key, created = coordinator.keys["d-0"], coordinator.created["d-0"]
    assert message.attestation.proof == shared_secret_proof(SECRET, key, created)
    assert Attestation(False, SECRET).check(message.attestation, key, created) == "shared-secret"
    assert SECRET.decode() not in repr(replace(config, enrolment_secret=SECRET))


def test_an_application_may_name_the_file_with_the_secret(coordinator, config, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    given = {"coordinator": config.coordinator, "population": "phones", "examples": config.examples}
    Device(**given, state=config.state, enrolment_secret=tmp_path / "secret").run_once()
    (message,) = coordinator.enrolments
    assert message.attestation.proof == shared_secret_proof(SECRET, coordinator.keys["d-0"], coordinator.created["d-0"])
    with pytest.raises(ConfigError, match="missing"):
        Device(**given, state=config.state, enrolment_secret=tmp_path / "missing")


def test_a_device_shows_what_its_platform_attests_for_its_key(coordinator, config, tmp_path):
    maker = Maker(dt.datetime.now(dt.UTC))
    run_session(replace(config, attest=lambda challenge: AndroidKey(maker.chain(challenge))))
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
