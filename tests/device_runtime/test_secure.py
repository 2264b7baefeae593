"""What a device refuses of a secure round at once. Whole rounds: tests/simulator/test_secure_rounds.py."""

import hashlib
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_runtime.errors import ConfigError
from device_runtime.permission.policy import Policy
from device_runtime.session import run_session
from device_runtime.state.assignment import StoredAssignment
from device_runtime.state.folder import KeyFile, Sealer
from device_runtime.state.records import read_journal
from fedcore.masking import fixed_points, last_session_number, layout_hash, model_hash, session_number, task_hash
from fedcore.release import LineageEntry, Release, SumBounds
from fedcore.signing import SigningKey, SucceedingKey, Succession, Successor, key_text
from fedcore.wire.messages import Abort, HeldCredential, IssuedCredential, SecaggParties, SharedSecret, encode
from fedcore.wire.signatures import device_id
from secagg import keys
from secagg.client import Client, SessionInput
from secagg.client_state import AggregationPolicy, ClientStage, ClientState
from secagg.keys import check_credential, check_possession, issue
from secagg.messages import Advertise, Invite, SessionResult
from secagg.packing import PackedSegment
from secagg.server import Server
from secagg.session import SessionPhase
from tests.device_runtime import linear
from tests.device_runtime.coordinator import answer, refusal, status
from tests.secagg.cohort import dimension, session_of


def private(seed):
    return Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def public(key):
    return key.public_key().public_bytes_raw()


SERVER, AUTHORITY = private(1), private(2)
RELEASE, LINEAGE = SigningKey(private(3)), SigningKey(private(4))
BOUNDS = SumBounds(clip_norm=1.0, bits=20, max_examples=100, min_sum=8)
NEVER = 1 << 40
ROUND = 1


def segments_of(layout):
    """The segments of a layout under BOUNDS, in fields of 26 bits."""
    return tuple(
        PackedSegment(one.size, 26, one.bits, one.low, one.high, one.norm, one.weighted)
        for one in fixed_points(layout, BOUNDS)
    )


SEGMENTS = segments_of(linear.plan().report)
TRUSTING = Policy(signers=(RELEASE.signer,))


def terms(plan, checkpoint, **changes):
    """The content of M0 for the linear plan, with some fields changed."""
    fields = {
        "mode": 1, "task": task_hash("t-1"), "round": session_number(ROUND, 1), "deadline": 0,
        "n_max": 20, "min_sum": 8, "w_max": 100, "layout_hash": layout_hash(linear.plan().report, linear.KEY.seed),
        "model_hash": model_hash(plan, checkpoint), "segments": SEGMENTS,
    }  # fmt: skip
    return Invite(**{**fields, **changes})


def invitation(signer=SERVER, **changes):
    """What makes M0 for the linear plan, with some fields changed."""

    def make(plan, checkpoint):
        invite = terms(plan, checkpoint, **changes)
        return invite.body() + keys.sign(signer, "invite", keys.NO_CONTEXT, invite.hash)

    return make


class Aggregator:
    """A real server of SA1, with eight devices beside the one under test, which is in slot 0.

    repeats: the number of the device's message that it answers with what it sent before.
    """

    def __init__(self, invite, repeats=None):
        self.server, self.repeats = Server(invite, SERVER, public(AUTHORITY)), repeats
        policy = AggregationPolicy(public(SERVER), public(AUTHORITY), 8)
        self.peers = {}
        for slot in range(1, 9):
            credential = issue(AUTHORITY, public(private(10 + slot)), bytes([slot]) * 16, NEVER)
            vector_D = np.zeros(dimension(invite), np.float32)
            brought = SessionInput(vector_D, 1, invite.model_hash, invite.layout_hash, credential)
            self.peers[slot] = Client(private(10 + slot), policy, brought)
        self.messages = dict.fromkeys(range(9), self.server.invitation)

    def answer(self, number, message):
        """The next message to the device; everybody else has answered by then."""
        if number == self.repeats:
            return self.messages[0]
        self.server.receive(0, message)
        for slot, peer in self.peers.items():
            self.server.receive(slot, peer.receive(self.messages[slot]).message)
        end = self.server.advance()
        if self.server.phase is SessionPhase.DRAWING:
            end = self.server.advance()
        if end.unmasking:
            self.server.settle(end.unmasking.run())
        self.messages = end.messages or self.server.results()
        return self.messages[0]


def releasing(signer=RELEASE, **changes):
    """What makes the release of the linear plan, with some fields changed."""

    def make(plan, checkpoint):
        fields = {
            "population": "phones", "plan": plan.sha256, "checkpoint": checkpoint.sha256, "bounds": BOUNDS,
            "lineage": LINEAGE.signer, "counter": 1, "expires_at": 2**33,
        }  # fmt: skip
        return signer.sign_statement(Release(**{**fields, **changes}))

    return make


def parties(server=SERVER, authority=AUTHORITY):
    return lambda url: SecaggParties(Succession(public(server)), public(authority), url)


def issuing(signer=AUTHORITY, first=AUTHORITY, device=None, lasts_s=3600, succession=None):
    """An authority that vouches for whoever asks; it says that its key is `first`."""

    def answer(asked, key):
        named = bytes.fromhex(device_id(key)) if device is None else device
        credential = issue(signer, asked.secagg, named, int(time.time()) + lasts_s)
        return IssuedCredential(credential, succession or Succession(public(first)))

    return answer


@pytest.fixture
def secure(coordinator):
    coordinator.invite, coordinator.release = invitation(), releasing()
    coordinator.parties, coordinator.issue = parties(), issuing()
    coordinator.server, coordinator.round = Succession(public(SERVER)), ROUND
    return coordinator


@pytest.fixture
def config(config):
    """A device that accepts the releases of RELEASE."""
    return replace(config, policy=TRUSTING)


def refused(coordinator, config, error, said=()):
    """The device gave up because of `error`, untrained, having said no more than that, and nothing in the clear."""
    outcome = run_session(config)
    assert (outcome.examples, outcome.steps) == (0, 0)
    assert (outcome.outcome, outcome.reason) == ("aborted", "secagg-refused"), outcome
    assert error in outcome.detail
    assert [number for number, _ in coordinator.said] == list(said)
    assert coordinator.reports == []
    assert coordinator.aborts[-1].reason == "secagg-refused"


@pytest.mark.security("A device refuses it unless its policy says otherwise")
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
        ({"segments": (replace(SEGMENTS[0], norm=0.0), *SEGMENTS[1:])}, "segments"),
        ({"segments": (replace(SEGMENTS[0], high=8.0), *SEGMENTS[1:])}, "segments"),
        ({"w_max": 1000}, "greatest weight is 1000"),
        ({"segments": tuple(replace(one, weighted=False) for one in SEGMENTS)}, "segments"),
    ],
)
def test_an_invitation_that_is_not_for_this_assignment_is_refused(secure, config, lie, error):
    secure.invite = invitation(**lie)
    refused(secure, config, error)


@pytest.mark.security("each statement is signed, names release, round, parent and checkpoint")
def test_a_device_takes_part_to_the_end_and_keeps_the_result(secure, config):
    secure.aggregate = Aggregator(terms(secure.plan, secure.checkpoint)).answer
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("reported", "")
    assert [number for number, _ in secure.said] == [1, 3, 5, 7, 9, 11]
    result = bytes.fromhex(read_journal(config.state)[-1].result)
    assert SessionResult.decode(result, session_of(result)).summed


def test_round_and_state_are_durable_before_a_message_leaves(secure, config):
    others, found = Aggregator(terms(secure.plan, secure.checkpoint)), []
    sealer = Sealer(KeyFile(config.state / "sealing-key"))

    def look(number, message):
        with closing(sqlite3.connect(f"file:{config.state / 'state.db'}?mode=ro", uri=True)) as database:
            ((row,),) = database.execute("SELECT stored FROM assignment").fetchall()
            ((noted,),) = database.execute("SELECT number FROM answered").fetchall()
        keep = msgspec.json.decode(row, type=StoredAssignment).secagg
        opened = sealer.open("state of the secure aggregation of assignment a-1", keep) if keep else None
        found.append((number, noted, ClientState.decode(opened).stage if opened else None))
        return others.answer(number, message)

    secure.aggregate = look
    run_session(config)
    stages = {
        1: None, 3: None, 5: None, 7: ClientStage.MASKED, 9: ClientStage.CONFIRMED, 11: ClientStage.REVEALED
    }  # fmt: skip
    once, whole = session_number(ROUND, 1), last_session_number(ROUND)
    assert found == [(number, whole if number == 11 else once, stage) for number, stage in stages.items()]


@pytest.mark.parametrize("number", [1, 3, 5, 7, 9, 11])
def test_a_coordinator_that_repeats_itself_gets_no_second_answer(secure, config, number):
    secure.aggregate = Aggregator(terms(secure.plan, secure.checkpoint), repeats=number).answer
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "secagg-refused")
    assert f"M{number - 1} of the secure aggregation came instead of M{number + 1}" in outcome.detail
    assert [said for said, _ in secure.said] == list(range(1, number + 1, 2))


def test_no_words_about_a_failure_leave_in_a_secure_round(secure, config, examples):
    np.savez(config.examples, x=examples["x"] * np.float32(1e30), y=examples["y"])
    outcome = run_session(config)
    assert outcome.reason == "non-finite-report"
    assert outcome.detail == read_journal(config.state)[-1].detail != ""
    assert secure.aborts == [Abort("non-finite-report")]


@pytest.mark.security("a device's min_cohort is held against that number")
def test_a_policys_least_cohort_holds_for_the_sum(secure, config):
    secure.invite = invitation(min_sum=8)
    config = replace(config, policy=Policy(min_cohort=9, signers=TRUSTING.signers))
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")


def shows(secure, key, number=ROUND):
    """The server shows this key from now on, and signs the invitation to a round with it."""
    secure.said.clear()
    secure.server = key.succession
    secure.invite = invitation(key.private, round=session_number(number, 1))
    secure.round = number
    secure.lineage = descent(secure, number)


def descent(secure, number):
    """The signed origin of the checkpoint in a later round, which no round has changed."""
    signed, same = secure.release(secure.plan, secure.checkpoint), secure.checkpoint.sha256
    return LINEAGE.sign_statement(LineageEntry(release=signed.digest, round=number - 1, parent=same, checkpoint=same))


@pytest.mark.security("Devices follow a chain of signatures … they never go back")
def test_a_device_follows_the_servers_key_to_its_successors(secure, config):
    run_session(config)
    assert [number for number, _ in secure.said] == [1]
    second = SucceedingKey("server", SERVER).successor()
    shows(secure, second, 8)
    run_session(config)
    assert [number for number, _ in secure.said] == [1]
    shows(secure, SucceedingKey("server", SERVER), 9)
    refused(secure, config, "nothing that leads to it")  # the old key holds no more
    shows(secure, second.successor().successor(), 10)
    run_session(config)
    assert [number for number, _ in secure.said] == [1]
    assert len(secure.enrolments) == 1


@pytest.mark.security("A device trusts the keys that it sees at its first enrolment, and pins them")
@pytest.mark.security("Devices follow a chain of signatures … they never go back")
@pytest.mark.parametrize("lie", ["another key", "a made-up chain", "none"])
def test_a_device_refuses_a_server_key_without_a_chain_from_its_own(secure, config, lie):
    run_session(config)
    other = SucceedingKey("server", private(8))
    if lie == "a made-up chain":
        made_up = Successor(other.public, other.successor().succession.successors[0].signature)
        other.succession = Succession(public(SERVER), (made_up,))
    shows(secure, other, 8)
    if lie == "none":
        secure.server = None
    (config.state / "secagg-key").unlink()  # nor by another enrolment
    secure.parties = parties(server=private(8))
    words = {"another key": "nothing that leads to it", "a made-up chain": "did not sign", "none": "does not show"}
    refused(secure, config, words[lie])


@pytest.mark.security("A device trusts the keys that it sees at its first enrolment, and pins them")
def test_a_device_takes_part_only_under_the_authority_that_it_saw_first(secure, config):
    run_session(config)
    secure.said.clear()
    (config.state / "device-key").unlink()  # another key must enrol again
    secure.parties = parties(authority=private(8))
    secure.issue = issuing(signer=private(8), first=private(8))
    refused(secure, config, "not the one that this device pinned")


def test_a_round_that_was_answered_is_not_answered_again(secure, config):
    run_session(config)
    secure.said.clear()
    refused(secure, config, "ReplayedRound")
    assert len(secure.enrolments) == 1


def test_a_device_that_insists_on_secure_rounds_takes_part_in_one(secure, config):
    config = replace(config, policy=Policy(require_secure_aggregation=True, signers=TRUSTING.signers))
    run_session(config)
    assert [number for number, _ in secure.said] == [1]
    assert read_journal(config.state)[-1].task == "t-1"


def attempt(coordinator, config, number, said_before=None, **changes):
    """One more attempt at the round, in which a real server answers; up to one message of the device, if named."""
    coordinator.attempt, answered = number, session_number(ROUND, number)
    coordinator.invite = invitation(round=answered, **changes)
    others = Aggregator(terms(coordinator.plan, coordinator.checkpoint, round=answered, **changes), repeats=said_before)
    coordinator.aggregate = others.answer
    coordinator.said.clear()
    return run_session(config)


@pytest.mark.security("A device takes part in one sum of a round and no second")
def test_a_device_that_revealed_joins_no_other_attempt_at_the_round(secure, config):
    """Two sums over cohorts that differ in one device would give its report."""
    assert attempt(secure, config, 1).outcome == "reported"
    outcome = attempt(secure, config, 2)
    assert (outcome.outcome, outcome.reason, outcome.examples) == ("aborted", "already-revealed", 0)
    assert secure.aborts[-1].reason == "already-revealed"
    assert secure.said == []


@pytest.mark.security("A device takes part in one sum of a round and no second")
def test_a_task_by_another_name_is_no_way_round_the_rounds_answered(secure, config):
    assert attempt(secure, config, 1).outcome == "reported"
    other = secure.assignment()
    other = msgspec.structs.replace(other, assignment="a-2", task="t-2", attempt=2)
    secure.faults["assignment"] = [answer(encode(other))]
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "already-revealed")


@pytest.mark.parametrize("number", [3, 7, 9])
def test_a_device_that_revealed_nothing_joins_the_next_attempt(secure, config, number):
    assert attempt(secure, config, 1, said_before=number).outcome == "aborted"
    assert attempt(secure, config, 2).outcome == "reported"


def test_a_state_that_does_not_open_costs_its_assignment_alone(secure, config):
    """What the device remembers of keys, releases and rounds is worth more than one report."""
    secure.aggregate = Aggregator(terms(secure.plan, secure.checkpoint)).answer
    secure.faults["secagg"] = [None] * 3 + [refusal("unavailable")] * 9
    run_session(config)
    with closing(sqlite3.connect(config.state / "state.db")) as database, database:
        (changed,) = database.execute(
            "UPDATE assignment SET stored = json_set(stored, '$.secagg', 'AAAA') RETURNING stored"
        ).fetchone()
        kept = database.execute("SELECT * FROM answered").fetchall()
    assert msgspec.json.decode(changed, type=StoredAssignment).phase == "masked"
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("failed", "report-lost")
    assert [path.name for path in config.state.glob("state.db*")] == ["state.db"]
    with closing(sqlite3.connect(config.state / "state.db")) as database:
        assert database.execute("SELECT * FROM answered").fetchall() == kept
        assert database.execute("SELECT * FROM assignment").fetchall() == []


@pytest.mark.security("It releases no share after that, and before it at most one of each neighbour")
@pytest.mark.parametrize("number", [1, 7, 9, 11])
def test_a_device_that_was_lied_to_keeps_nothing_of_the_session(secure, config, number):
    others = Aggregator(terms(secure.plan, secure.checkpoint))

    def lie(said, message):
        answer = others.answer(said, message)
        return answer[:34] + bytes(len(answer) - 34) if said == number else answer

    secure.aggregate = lie
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "secagg-refused")
    with closing(sqlite3.connect(config.state / "state.db")) as database:
        assert database.execute("SELECT * FROM assignment").fetchall() == []
    assert list(config.state.glob("*.report")) == []
    assert [said for said, _ in secure.said] == list(range(1, number + 1, 2))


# --- the enrolment authority


def again(coordinator, config):
    """Another session, in a round that was not answered yet; what the device said in it."""
    coordinator.said.clear()
    with closing(sqlite3.connect(config.state / "state.db")) as database, database:
        database.execute("DELETE FROM answered")
        database.execute("DELETE FROM assignment")
    run_session(config)
    return [number for number, _ in coordinator.said]


@pytest.mark.security("its evidence, which is bound to the key and the moment")
def test_a_credential_is_asked_for_once_and_shown_to_the_coordinator(secure, config):
    run_session(config)
    assert again(secure, config) == [1]
    (asked,) = secure.issued
    key = secure.keys["d-0"]
    check_possession(asked.secagg, asked.possession, hashlib.sha256(key.encode()).digest(), secure.asked_at)
    (_, message) = secure.said[0]
    shown = Advertise.decode(message, terms(secure.plan, secure.checkpoint).hash)
    assert check_credential(public(AUTHORITY), shown.id, shown.credential, 0).device.hex() == device_id(key)


@pytest.mark.parametrize(("lasts_s", "requests"), [(3600, 1), (0, 2), (-5, 2)])
def test_a_credential_is_renewed_before_it_ends(secure, config, lasts_s, requests):
    secure.issue = issuing(lasts_s=lasts_s)
    run_session(config)
    again(secure, config)
    assert len(secure.issued) >= requests


def test_a_credential_serves_on_while_its_authority_cannot_be_reached(secure, config):
    run_session(config)
    with closing(sqlite3.connect(config.state / "state.db")) as database, database:
        database.execute("UPDATE credential SET kept = json_set(kept, '$.renew_at', 0)")
    secure.faults["credential"] = [status(500)]
    assert again(secure, config) == [1]
    assert len(secure.issued) == 1
    assert again(secure, config) == [1]
    assert len(secure.issued) == 2


@pytest.mark.security("the device checks what it gets against the authority's key")
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (issuing(signer=private(9)), "not the one that this device pinned"),
        (issuing(signer=private(9), first=private(9)), "not the one that this device pinned"),
        (issuing(device=bytes(16)), "credential of another"),
    ],
)
def test_a_device_takes_no_credential_but_its_own_of_its_authority(secure, config, answer, error):
    secure.issue = answer
    refused(secure, config, error)


def test_a_device_follows_the_authoritys_key_to_its_successor(secure, config):
    run_session(config)
    second = SucceedingKey("authority", AUTHORITY).successor()
    secure.issue = issuing(second.private, succession=second.succession)
    with closing(sqlite3.connect(config.state / "state.db")) as database, database:
        database.execute("UPDATE credential SET kept = json_set(kept, '$.renew_at', 0)")
    assert again(secure, config) == []  # the coordinator goes by the old key still
    secure.parties = parties(authority=second.private)
    assert again(secure, config) == [1]
    assert again(secure, config) == [1]
    assert len(secure.enrolments) == 3


def test_a_device_hears_of_the_authoritys_successor_from_the_coordinator(secure, config):
    run_session(config)
    second = SucceedingKey("authority", AUTHORITY).successor()
    secure.issue = issuing(second.private, succession=second.succession)
    secure.parties = parties(authority=second.private)
    secure.faults["secagg"] = [refusal("unusable-message")]  # the old credential
    again(secure, config)
    assert again(secure, config) == [1]


def named(config, authority, url=None):
    key = key_text(public(authority))
    return replace(config, policy=Policy(signers=TRUSTING.signers, authority=key, authority_url=url))


@pytest.mark.security("The owner's policy can name the authority before that")
def test_a_device_goes_by_the_authority_of_its_policy_whatever_it_is_told(secure, config):
    config = named(config, private(7))
    secure.issue = issuing(signer=private(7), first=private(7))
    refused(secure, config, "another enrolment authority")
    secure.parties = parties(authority=private(7))
    (config.state / "state.db").unlink()
    run_session(config)
    assert [number for number, _ in secure.said] == [1]


def test_a_device_with_an_authority_of_its_own_enrols_with_its_credential(secure, config):
    config = replace(named(config, AUTHORITY, secure.url), enrolment_secret=b"only the authority knows this")
    run_session(config)
    assert [number for number, _ in secure.said] == [1]
    (enrolment,), (asked,) = secure.enrolments, secure.issued
    assert isinstance(enrolment.attestation, HeldCredential)
    assert isinstance(asked.attestation, SharedSecret)


def test_a_credential_that_the_coordinator_refuses_is_asked_for_anew(secure, config):
    secure.faults["secagg"] = [refusal("unusable-message")]
    run_session(config)
    again(secure, config)
    assert len(secure.issued) == 2


def test_a_coordinator_that_comes_to_an_authority_later_is_taken_up(secure, config):
    secure.parties = lambda url: None
    refused(secure, config, "names no enrolment authority")
    secure.parties = parties()
    assert again(secure, config) == [1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"authority": "ed25519:no"}, "authority = "),
        ({"authority_url": "https://a.example"}, "needs authority"),
        ({"authority": key_text(public(AUTHORITY)), "authority_url": "ftp://a"}, "ftp://a"),
    ],
)
def test_a_policy_names_an_authority_that_can_be_one(changes, says):
    with pytest.raises(ConfigError, match=says):
        Policy(**changes)
