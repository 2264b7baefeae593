"""What a device refuses of a secure round at once. Whole rounds: tests/simulator/test_secure_rounds.py."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_runtime.permission.policy import Policy
from device_runtime.session import run_session
from device_runtime.state.journal import read_journal
from fedcore.masking import layout_hash, masked_segments, model_hash, session_number, task_hash
from fedcore.wire.messages import Credential
from secagg import keys
from secagg.messages import Invite
from secagg.packing import Segment
from tests.device_runtime import linear


def private(seed):
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def public(key):
    return key.public_key().public_bytes_raw()


SERVER, AUTHORITY = private(1), private(2)
SEGMENTS = tuple(
    Segment(one.size, 26, 20, -1.0, 1.0, 1.0, one.reduction == "mean") for one in masked_segments(linear.plan().report)
)


def invitation(signer=SERVER, **changes):
    """What makes M0 for the linear plan, with some fields changed."""

    def make(plan, checkpoint):
        fields = {
            "mode": 1, "task": task_hash("t-1"), "round": session_number(linear.PLACE.round, 1), "deadline": 0,
            "n_max": 20, "min_sum": 8, "w_max": 100, "layout_hash": layout_hash(linear.plan().report),
            "model_hash": model_hash(plan, checkpoint), "segments": SEGMENTS,
        }  # fmt: skip
        invite = Invite(**{**fields, **changes})
        return invite.body() + keys.sign(signer, "invite", keys.NO_CONTEXT, invite.hash)

    return make


def enrolling(server=SERVER, authority=AUTHORITY):
    return lambda id_: Credential(keys.enrol(authority, id_), public(server), public(authority))


@pytest.fixture
def secure(coordinator):
    coordinator.invite, coordinator.vouch = invitation(), enrolling()
    return coordinator


def refused(coordinator, config, error, said=()):
    """The device gave up because of `error`, untrained, having said no more than that, and nothing in clear."""
    outcome = run_session(config)
    assert (outcome.examples, outcome.steps) == (0, 0)
    assert (outcome.outcome, outcome.reason) == ("aborted", "secagg-refused"), outcome
    assert error in outcome.detail
    assert [number for number, _ in coordinator.said] == list(said)
    assert coordinator.reports == []
    assert coordinator.aborts[-1].reason == "secagg-refused"


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ({"signer": private(9)}, "BadSignature"),
        ({"mode": 0}, "PolicyViolation"),
        ({"min_sum": 7}, "PolicyViolation"),
        ({"model_hash": bytes(32)}, "ModelMismatch"),
        ({"layout_hash": bytes(32)}, "ModelMismatch"),
        ({"task": bytes(32)}, "another task or round"),
        ({"round": session_number(9, 1)}, "another task or round"),
        ({"segments": SEGMENTS[:1]}, "segments"),
        ({"segments": tuple(replace(one, weighted=False) for one in SEGMENTS)}, "segments"),
    ],
)
def test_an_invitation_that_is_not_for_this_assignment_is_refused_and_nothing_is_said(secure, config, lie, error):
    secure.invite = invitation(**lie)
    refused(secure, config, error)


def test_a_policys_least_cohort_holds_for_the_sum(secure, config):
    secure.invite = invitation(min_sum=8)
    config = replace(config, policy=Policy(min_cohort=9))
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")


def test_a_device_takes_part_with_the_keys_that_it_saw_first_and_no_others(secure, config):
    run_session(config)
    assert [number for number, _ in secure.said] == [1]
    secure.said.clear()
    (config.state / "secagg-key").unlink()  # another id must enrol again
    secure.vouch = enrolling(server=private(8))
    refused(secure, config, "other keys")


def test_a_round_that_was_answered_is_not_answered_again(secure, config):
    run_session(config)
    secure.said.clear()
    refused(secure, config, "ReplayedRound")
    assert len(secure.enrolments) == 1


def test_a_device_that_insists_on_secure_rounds_takes_part_in_one(secure, config):
    config = replace(config, policy=Policy(require_secure_aggregation=True))
    run_session(config)
    assert [number for number, _ in secure.said] == [1]
    assert read_journal(config.state)[-1].task == "t-1"
