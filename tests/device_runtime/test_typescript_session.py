"""Sessions of the device runtime in TypeScript against a coordinator that errs and lies: what it sends, and why not."""

import json
import re
import tomllib

import numpy as np
import pytest

from fedcore.masking import session_number
from fedcore.signing import SucceedingKey, Succession, key_text
from fedcore.wire.messages import Accepted, Offer, encode
from tests.device_runtime import linear
from tests.device_runtime.coordinator import answer, hang_up, refusal, report_of, serving, status
from tests.device_runtime.node import device_words, sessions
from tests.device_runtime.test_policy import GRAPH_BYTES
from tests.device_runtime.test_secure import (
    AUTHORITY,
    RELEASE,
    ROUND,
    SERVER,
    Aggregator,
    invitation,
    issuing,
    parties,
    private,
    public,
    releasing,
    terms,
)
from tests.device_runtime.test_session import begin
from tests.tree import ROOT

pytestmark = pytest.mark.promise("Devices in Python, Node and browsers keep the protocol with any coordinator")


@pytest.fixture(scope="module")
def node():
    with sessions() as run:
        yield run


@pytest.fixture
def session(node, coordinator, tmp_path, examples):
    """Runs a session of a device with ten examples; a policy may be given."""
    return lambda **policy: node(device_words(tmp_path / "node", coordinator.url, "phones", examples, **policy))


@pytest.fixture
def secure(coordinator):
    coordinator.invite, coordinator.release = invitation(), releasing()
    coordinator.parties, coordinator.issue = parties(), issuing()
    coordinator.server, coordinator.round = Succession(public(SERVER)), ROUND
    return coordinator


def test_a_report_in_clear_is_what_the_arithmetic_says(coordinator, session, examples):
    coordinator.lost_after_s, coordinator.over_selected = 30.0, True
    outcome = session()
    assert (outcome["outcome"], outcome["examples"], outcome["device"]) == ("reported", 10, "d-0")
    np.testing.assert_allclose(coordinator.reports[0], report_of(examples), rtol=1e-5)
    hello = coordinator.checkins[0]
    assert (hello.capabilities.formats, hello.capabilities.secagg, hello.examples) == (
        ("onnx",),
        ("SA1",),
        {"default": 8},
    )
    assert coordinator.calls == ["check-in", "assignment", "blob", *["blob"] * 6, "hold", "report"]


def test_a_download_goes_on_where_it_broke_even_in_a_later_session(coordinator, session):
    coordinator.faults["blob"] = [begin(coordinator.plan.sha256, 10), hang_up, hang_up, hang_up]
    assert session()["reason"] == "unreachable"
    assert session()["outcome"] == "reported"
    asked = [headers.get("range") for call, headers in coordinator.headers if call == "blob"]
    assert asked[:6] == [None, *["bytes=10-"] * 4, None]
    assert "bytes=10-" not in asked[5:]


def test_a_kept_start_of_other_bytes_costs_a_download_and_nothing_else(coordinator, session):
    good = coordinator.blobs[coordinator.plan.sha256]
    coordinator.blobs[coordinator.plan.sha256] = bytes(len(good))
    coordinator.faults["blob"] = [begin(coordinator.plan.sha256, 10), hang_up, hang_up, hang_up]
    assert session()["reason"] == "unreachable"
    coordinator.blobs[coordinator.plan.sha256] = good
    assert session()["outcome"] == "reported"


def test_a_coordinator_that_calls_every_request_a_replay_ends_the_session(coordinator, session):
    coordinator.faults["report"] = [refusal("replayed-signature")] * 9
    found = session()
    assert (found["outcome"], found["reason"], found["retryable"]) == ("failed", "replayed-signature", "transient")
    assert (coordinator.calls.count("report"), coordinator.aborts) == (4, [])


@pytest.mark.parametrize("rule", ["sessions", "bytes"])
def test_a_kept_report_is_sent_though_the_day_has_no_other_session(coordinator, session, rule):
    coordinator.faults["report"] = [refusal("unavailable", Retry_After="61")]
    first = session()
    most = {"sessions": 1, "bytes": first["bytes_up"] + first["bytes_down"] + 300}  # room for the report alone
    assert session(per_day={rule: most[rule]})["outcome"] == "reported"
    assert session(per_day={"sessions": 2})["outcome"] == "reported", "the report sent late is no other session"


@pytest.mark.parametrize("policy", [{"populations": ["tablets"]}, {"min_cohort": 2}, {"collections": ["diary"]}])
def test_a_kept_report_that_the_policy_forbids_now_is_dropped(coordinator, session, policy):
    coordinator.faults["report"] = [refusal("unavailable", Retry_After="61")]
    session()
    calls = len(coordinator.calls)
    assert next(iter(policy)) in session(**policy)["detail"]
    assert len(coordinator.calls) == calls, "nobody is told"
    assert session()["outcome"] == "reported"
    assert coordinator.calls.count("check-in") == 2


def test_a_report_that_is_too_stale_is_not_sent(coordinator, session):
    coordinator.over_selected = True
    coordinator.faults["hold"] = [refusal("too-stale")]
    found = session()
    assert (found["outcome"], found["reason"], found["retryable"]) == ("not-needed", "too-stale", "transient")
    assert "report" not in coordinator.calls


def test_the_policy_of_the_handbook_is_one(coordinator, session):
    (text,) = re.findall(r"```toml\n(populations.*?)```", (ROOT / "docs" / "device.md").read_text(), re.DOTALL)
    policy = tomllib.loads(text)
    assert policy["cache_bytes"]
    assert "require_https" in session(**policy, unsigned_programs=True)["detail"]


def test_a_cache_of_no_bytes_keeps_no_plan(coordinator, session):
    assert session(cache_bytes=0)["outcome"] == "reported"
    assert session()["outcome"] == "reported"
    assert coordinator.calls.count("blob") == 14
    coordinator.faults["check-in"] = [refusal("unknown-device")]
    assert session()["outcome"] == "reported"
    assert coordinator.calls.count("blob") == 15, "the checkpoint alone, though it enrolled again"


def test_a_plan_that_the_cache_cannot_keep_is_not_fetched(coordinator, session):
    most = coordinator.plan.size + GRAPH_BYTES + coordinator.checkpoint.size
    refused = session(cache_bytes=most - 1)
    assert (refused["outcome"], refused["reason"]) == ("aborted", "plan-refused")
    assert refused["detail"].endswith(f"against cache_bytes of this device's policy: {most} found, {most - 1} allowed")
    assert coordinator.calls.count("blob") == 1
    assert session(cache_bytes=most)["outcome"] == "reported"


def test_a_session_that_was_used_up_counts_for_the_day(coordinator, session):
    assert session()["outcome"] == "reported"
    found = session(per_day={"sessions": 1})
    assert (found["outcome"], "per_day.sessions" in found["detail"]) == ("not-now", True)
    assert coordinator.calls.count("check-in") == 1


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", 201 * "a", ""])
def test_an_assignment_that_no_request_can_name_is_no_answer(coordinator, session, name):
    given = json.loads(encode(coordinator.assignment())) | {"assignment": name, "lost_after_s": 0.01}
    coordinator.faults["assignment"] = [answer(json.dumps(given).encode())]
    assert session()["reason"] == "bad-answer"
    outcome = session()
    assert outcome["outcome"] == "reported", outcome


@pytest.mark.security("calls its coordinator alone, and for secure rounds the enrolment authority")
def test_a_device_follows_no_redirect(coordinator, session):
    with serving() as elsewhere:
        coordinator.faults["blob"] = [status(307, Location=f"{elsewhere.url}/v1/blobs/{coordinator.plan.sha256}")]
        assert session()["reason"] == "http-307"
        assert (elsewhere.calls, elsewhere.headers) == ([], [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan["passes"][0]["loop"].update(batch_size=2**40), "plan.memory_bytes"),
        (lambda plan: plan.update(name="\x1b[2J", examples={"fields": []}), r"plan \u001b[2J names no example field"),
        (lambda plan: plan.update(name=1000 * "a", examples={"fields": []}), "plan aaa"),
    ],
)
def test_a_hostile_plan_is_refused_in_plain_words(coordinator, session, change, words):
    plan = json.loads(linear.plan().encode())
    change(plan)
    coordinator.offer(json.dumps(plan).encode(), linear.graphs(), {"params": linear.PARAMS})
    found = session()
    assert (found["outcome"], found["reason"]) == ("aborted", "plan-refused")
    assert words in found["detail"]
    assert len(found["detail"]) <= 500


@pytest.mark.parametrize(
    ("policy", "outcome", "words"),
    [
        ({"populations": ["tablets"]}, "not-now", "populations"),
        ({"require_https": True}, "not-now", "require_https"),
        ({"per_day": {"sessions": 0}}, "not-now", "per_day.sessions"),
        ({"require_secure_aggregation": True}, "aborted", "require_secure_aggregation"),
        ({"min_cohort": 2}, "aborted", "min_cohort"),
        ({"signers": [RELEASE.signer]}, "aborted", "signed by nobody"),
        ({"collections": ["diary"]}, "aborted", "collections"),
        ({"plan": {"parameters": 2}}, "aborted", "plan.parameters"),
        ({"plan": {"batch_examples": 10}}, "aborted", "plan.batch_examples"),
    ],
)
def test_the_owners_policy_is_kept(coordinator, session, policy, outcome, words):
    found = session(**policy)
    assert found["outcome"] == outcome
    assert words in found["detail"]
    assert coordinator.reports == []
    assert [one.reason for one in coordinator.aborts] == (["plan-refused"] if outcome == "aborted" else [])
    assert outcome == "aborted" or coordinator.calls == []


@pytest.mark.security("Its policy names the signers … and bounds what it spends")
@pytest.mark.security("Of collections that the device's policy does not name it learns nothing")
def test_offers_tell_nothing_of_a_collection_that_is_not_shown(coordinator, session):
    rules = ({"min_examples": 11}, {"min_examples": 10}, {})
    offers = tuple(Offer(task=f"t-{place}", collection="default", **rule) for place, rule in enumerate(rules))
    coordinator.faults["check-in"] = [answer(encode(Accepted("s-1", offers)))] * 2
    assert "collections" in session(collections=["diary"])["detail"]
    assert session()["outcome"] == "reported"
    assert [willing.tasks for willing in coordinator.willing] == [("t-2",), ("t-1", "t-2")]


def test_a_device_that_stopped_after_it_masked_goes_on(secure, session):
    others = Aggregator(terms(secure.plan, secure.checkpoint))
    heard = []

    def aggregate(number, message):
        """M8 goes to who asks for it anew: the answer to M7 is lost."""
        heard.append(others.answer(number, message))
        return b"" if number == 7 else heard[-1]

    secure.aggregate, secure.hear = aggregate, lambda number: heard[-1]
    secure.faults["secagg"] = [None] * 4 + [refusal("unavailable", Retry_After="61")]
    assert session(signers=[RELEASE.signer])["reason"] == "unavailable"
    found = session(signers=[RELEASE.signer], per_day={"sessions": 1})
    assert (found["outcome"], found["secure"], found["examples"]) == ("reported", True, 10)
    assert [number for number, _ in secure.said] == [1, 3, 5, 7, 9, 11]
    assert secure.calls.count("check-in") == 1


def test_a_device_goes_by_the_authority_of_its_policy(secure, session):
    secure.issue = issuing(signer=private(7), first=private(7))
    outcome = session(signers=[RELEASE.signer], authority=key_text(public(private(7))))
    assert (outcome["outcome"], outcome["reason"]) == ("aborted", "secagg-refused")
    assert "another enrolment authority" in outcome["detail"]
    assert secure.said == []


def test_a_device_hears_of_the_authoritys_successor(secure, session):
    secure.faults["secagg"] = [refusal("unusable-message")]  # its credential is of the authority's first key
    assert session(signers=[RELEASE.signer])["reason"] == "unusable-message"
    second = SucceedingKey("authority", AUTHORITY).successor()
    secure.issue = issuing(second.private, succession=second.succession)
    secure.parties = parties(authority=second.private)
    secure.attempt, secure.invite = 2, invitation(round=session_number(ROUND, 2))
    secure.aggregate = lambda number, message: b"\x09"
    assert "M9 of the secure aggregation came instead of M2" in session(signers=[RELEASE.signer])["detail"]
    assert [number for number, _ in secure.said] == [1], "it is this device's credential that counts"
    assert len(secure.enrolments) == 2
