"""Scenarios in the clear: check-in, assignment, blobs, reports, and what goes wrong with them."""

import email.utils
import threading
import time

import numpy as np

from fedcore import checkpoint
from fedcore.wire.messages import Accepted, Offer, Rejected, encode
from fedcore.wire.signatures import Signature
from tests.conformance.promises import ended, promise
from tests.device_runtime import linear
from tests.device_runtime.coordinator import WINDOW, answer, cut, hang_up, refusal, report_of, status
from tests.device_runtime.test_onnx_check import endless

JUNK = [b"", b"null", b"{", b"\xff\xfe", b'{"outcome": "assigned"}', b"[" * 10_000]


@promise("6", "a report is the weighted arithmetic of the plan on the local examples", brief=True)
def reports(coordinator, device):
    ended(device.session(), "reported")
    np.testing.assert_allclose(coordinator.reports[0], report_of(linear.examples(10)), rtol=1e-5)
    assert (coordinator.calls[:2], coordinator.calls[-1]) == (["check-in", "assignment"], "report")


@promise("2", "counts of examples are rounded down to a power of two, and formats and protocols are named")
def check_in_says_no_more_than_it_must(coordinator, device):
    device.session()
    hello = coordinator.checkins[0]
    assert hello.examples == {"default": 8}
    assert "onnx" in hello.capabilities.formats
    assert all((hello.capabilities.runtime, hello.capabilities.version, hello.capabilities.engine))
    memory_mb = hello.capabilities.memory_mb
    assert memory_mb is None or memory_mb & (memory_mb - 1) == 0


@promise("2", "a device tells of its app's labels those that its owner lists, and none where no list is", brief=True)
def tells_the_labels_that_its_owner_lists(coordinator, device):
    for listed in ({}, {"labels": ["region", "ring"]}, {"labels": ["region", "app_version"]}):
        ended(device.session(**listed), "reported")
    told = [{}, {"region": "eu"}, {"region": "eu", "app_version": "3.2.1"}]
    assert [hello.labels or {} for hello in coordinator.checkins] == told


@promise("4", "a device shows its owner the target of the work that it joined, and evaluates none")
def shows_the_target(coordinator, device):
    coordinator.lies = {"target": "region = us and \u202eodd"}
    outcome = device.session(labels=["region"])
    ended(outcome, "reported")
    assert outcome["target"] == "region = us and \\u202eodd"


@promise("3", "a rejection ends the session, and nothing more is asked")
def is_rejected(coordinator, device):
    coordinator.faults["check-in"] = [answer(encode(Rejected("resting", WINDOW)))]
    ended(device.session(), "rejected", "resting")
    assert coordinator.calls == ["check-in"]


@promise("2", "a device shows the token of its last rejection, and none after a rejection without one")
def shows_its_token(coordinator, device):
    rejections = [Rejected("resting", WINDOW, "a token"), Rejected("resting", WINDOW), Rejected("resting", WINDOW)]
    coordinator.faults["check-in"] = [answer(encode(rejected)) for rejected in rejections]
    for _ in rejections:
        ended(device.session(), "rejected", "resting")
    assert [hello.token or "" for hello in coordinator.checkins] == ["", "a token", ""]


@promise("2", "a device whose formats nobody wants says which were wanted")
def is_told_of_other_formats(coordinator, device):
    coordinator.faults["check-in"] = [answer(encode(Rejected("unsupported-format", WINDOW, formats=("executorch",))))]
    outcome = device.session()
    ended(outcome, "rejected", "unsupported-format")
    assert "executorch" in outcome["detail"]


@promise("2", "a device waits only for tasks of which every rule holds, and tells nobody why it does not")
def is_unwilling(coordinator, device):
    offers = (
        Offer(task="t-1", collection="default", min_examples=11),
        Offer(task="t-2", collection="other", min_examples=1),
        Offer(task="t-3", collection="default", min_recent_examples=11, max_example_age_s=9.0),
    )
    coordinator.faults["check-in"] = [answer(encode(Accepted("s-1", offers)))]
    ended(device.session(), "rejected")
    assert coordinator.calls == ["check-in"]


@promise("4", "a device that is not drawn in the time that it waits is rejected")
def is_not_selected(coordinator, device):
    coordinator.faults["assignment"] = [answer(encode(Rejected("not-selected", WINDOW)))]
    ended(device.session(), "rejected", "not-selected")
    assert coordinator.headers[-1][1].get("Prefer", coordinator.headers[-1][1].get("prefer", "")).startswith("wait=")


@promise("1", "a call is made again on 429, on 503 and after a broken connection, signed anew", brief=True)
def calls_again(coordinator, device):
    coordinator.faults["check-in"] = [status(503), status(429)]
    coordinator.faults["assignment"] = [hang_up]
    coordinator.faults["blob"] = [cut]
    ended(device.session(), "reported")
    assert coordinator.calls[:5] == ["check-in"] * 3 + ["assignment"] * 2
    assert len({nonce_of(headers) for call, headers in coordinator.headers if call == "check-in"}) == 3


@promise("1", "before an assignment a call is made again three times, and not more")
def gives_up_calling(coordinator, device):
    coordinator.faults["check-in"] = [status(503)] * 9
    ended(device.session(), "failed")
    assert coordinator.calls == ["check-in"] * 4


@promise("1", "a device does not call again before Retry-After")
def waits_as_told(coordinator, device):
    at = []

    def busy(handler):
        at.append(time.monotonic())
        status(503, Retry_After="2")(handler)

    coordinator.faults["check-in"] = [busy, lambda handler: at.append(time.monotonic()) or status(503)(handler)]
    ended(device.session(), "reported")
    assert at[1] - at[0] >= 2


@promise("10", "a device that was revoked ends its session by name, keeps its key, and may be taken back")
def is_revoked(coordinator, device):
    for call in ("check-in", "assignment", "blob", "report"):
        coordinator.faults[call] = [refusal("device-revoked")]
        ended(device.session(), "failed", "device-revoked")
    assert len(coordinator.enrolments) == 1
    ended(device.session(), "reported")


@promise("1", "any other refusal ends the session")
def takes_no_for_an_answer(coordinator, device):
    coordinator.faults["check-in"] = [refusal("unknown-population")]
    ended(device.session(), "failed", "unknown-population")
    assert coordinator.calls == ["check-in"]


@promise("1", "an answer that is no message of the protocol ends the session, by name")
def refuses_junk(coordinator, device):
    for junk in JUNK:
        coordinator.faults["assignment"] = [answer(junk)]
        ended(device.session(), "failed", "bad-answer")
    coordinator.faults["check-in"] = [answer(b"<html>a captive portal", "text/html")]
    ended(device.session(), "failed", "bad-answer")
    assert coordinator.reports == []


@promise("1", "a message of another version is refused")
def refuses_another_version(coordinator, device):
    text = encode(coordinator.assignment()).replace(b'"version":1', b'"version":2')
    coordinator.faults["assignment"] = [answer(text)]
    ended(device.session(), "failed", "bad-answer")


@promise("10", "a request that its HTTP stack sent twice is signed anew")
def mends_a_replay(coordinator, device):
    coordinator.faults["report"] = [refusal("replayed-signature")]
    ended(device.session(), "reported")
    sent = [headers for call, headers in coordinator.headers if call == "report"]
    assert len({nonce_of(headers) for headers in sent}) == 2


@promise("10", "a coordinator that calls every request a replay ends the session by name")
def is_replayed_for_ever(coordinator, device):
    coordinator.faults["check-in"] = [refusal("replayed-signature")] * 9
    ended(device.session(), "failed", "replayed-signature")
    assert coordinator.calls == ["check-in"] * 4


@promise("10", "after stale-signature a device signs by the coordinator's clock, once")
def signs_by_the_coordinators_clock(coordinator, device):
    theirs = time.time() + 20
    date = email.utils.formatdate(theirs, usegmt=True)
    coordinator.faults["check-in"] = [refusal("stale-signature", Date=date)]
    ended(device.session(), "reported")
    before = len(coordinator.calls)
    coordinator.faults["check-in"] = [refusal("stale-signature", Date=date)] * 9
    ended(device.session(), "failed", "stale-signature")
    assert coordinator.calls[before:] == ["check-in"] * 2
    assert abs(signature_of(coordinator.headers[-1][1]).created - theirs) < 15


@promise("10", "a device that the coordinator does not know enrols again")
def enrols_again(coordinator, device):
    ended(device.session(), "reported")
    coordinator.faults["check-in"] = [refusal("unknown-device")]
    ended(device.session(), "reported")
    assert len(coordinator.enrolments) == 2


@promise("9", "a device enrols once, and keeps its key across restarts")
def enrols_once(coordinator, device):
    outcomes = [device.session(), device.session()]
    assert len(coordinator.enrolments) == 1
    assert outcomes[0]["device"] == outcomes[1]["device"]


@promise("5", "a blob with another digest than was asked for is not used")
def checks_blobs(coordinator, device):
    coordinator.faults["blob"] = [answer(b"x" * coordinator.plan.size, "application/octet-stream")] * 4
    ended(device.session(), "failed", "bad-answer")
    assert coordinator.reports == []


@promise("6", "a report that cannot leave is kept, and sent by a later session without training again", brief=True)
def sends_a_kept_report(coordinator, device):
    coordinator.faults["report"] = [refusal("unavailable", Retry_After="61")]
    ended(device.session(), "failed", "unavailable")
    before = len(coordinator.calls)
    ended(device.session(), "reported")
    assert set(coordinator.calls[before : coordinator.calls.index("report", before)]) <= {"hold", "blob"}
    assert coordinator.aborts == []


@promise("6", "a lost receipt is asked for with the same bytes")
def asks_for_a_lost_receipt(coordinator, device):
    coordinator.unheard = 1
    ended(device.session(), "reported")
    first, again = coordinator.reports
    np.testing.assert_array_equal(first, again)


@promise("6", "a receipt for another report is not taken")
def checks_the_receipt(coordinator, device):
    receipt = coordinator.count("a-1", linear_report())
    coordinator.faults["report"] = [answer(receipt)] * 4
    outcome = device.session()
    ended(outcome, "failed")
    assert outcome["reason"] == "bad-answer"


@promise("6", "a damaged upload is sent once more")
def sends_a_damaged_report_again(coordinator, device):
    coordinator.faults["report"] = [refusal("digest-mismatch")]
    ended(device.session(), "reported")


@promise("6", "a device that was stopped at work gives up with runtime-failed, and does not train again")
def gives_up_what_it_was_stopped_at(coordinator, device):
    reached, over = threading.Event(), threading.Event()
    coordinator.faults["blob"] = [lambda handler: (reached.set(), over.wait(60))]
    device.killed_when(reached)
    over.set()
    ended(device.session(), "aborted", "runtime-failed")
    assert [one.reason for one in coordinator.aborts] == ["runtime-failed"]
    assert coordinator.reports == []
    ended(device.session(), "reported")


@promise("6", "a device asks before it sends where more were selected, and sends nothing that is not needed")
def sends_nothing_unneeded(coordinator, device):
    coordinator.over_selected = True
    coordinator.faults["hold"] = [refusal("no-longer-needed")]
    ended(device.session(), "not-needed", "no-longer-needed")
    assert "report" not in coordinator.calls


@promise("6", "a report that came too late is no failure")
def is_late(coordinator, device):
    coordinator.faults["report"] = [refusal("no-longer-needed")]
    ended(device.session(), "not-needed", "no-longer-needed")


@promise("6", "an assignment that a device was done with is not trained for again")
def refuses_a_second_training(coordinator, device):
    ended(device.session(), "reported")
    coordinator.faults["assignment"] = [answer(encode(coordinator.assignment()))]
    device.session()
    assert len(coordinator.reports) == 1


@promise("6", "examples with a NaN, or without a field, are invalid-examples")
def refuses_invalid_examples(coordinator, device):
    good = linear.examples(10)
    for bad in (good | {"x": np.full_like(good["x"], np.nan)}, {"x": good["x"]}):
        device.hold(bad)
        ended(device.session(), "aborted", "invalid-examples")
    assert [one.reason for one in coordinator.aborts] == ["invalid-examples"] * 2
    assert coordinator.reports == []


@promise("6", "a report with a NaN or an infinity does not leave: non-finite-report")
def refuses_a_report_that_is_not_finite(coordinator, device):
    good = linear.examples(10)
    device.hold(good | {"x": good["x"] * np.float32(1e30)})
    ended(device.session(), "aborted", "non-finite-report")
    assert coordinator.reports == []


@promise("6", "a graph that loops for ever is plan-refused", brief=True)
def refuses_a_loop(coordinator, device):
    graphs = linear.graphs() | {"train.begin": endless().SerializeToString()}
    coordinator.offer(linear.plan(graphs), graphs, {"params": linear.PARAMS})
    ended(device.session(), "aborted", "plan-refused")
    assert [one.reason for one in coordinator.aborts] == ["plan-refused"]


@promise("6", "a plan that needs more memory than its owner allows is plan-refused")
def refuses_what_needs_too_much_memory(coordinator, device):
    ended(device.session(plan={"memory_bytes": 1000}), "aborted", "plan-refused")
    assert coordinator.reports == []


@promise("6", "bytes that are no graph are plan-refused")
def refuses_no_graph(coordinator, device):
    graphs = linear.graphs() | {"train.step": b"no graph"}
    coordinator.offer(linear.plan(graphs), graphs, {"params": linear.PARAMS})
    ended(device.session(), "aborted", "plan-refused")


@promise("4", "an owner's policy may refuse an assignment with plan-refused")
def keeps_its_owners_policy(coordinator, device):
    for policy in ({"min_cohort": 2}, {"require_secure_aggregation": True}):
        ended(device.session(**policy), "aborted", "plan-refused")
    assert coordinator.reports == []


def linear_report():
    """Some report of the linear plan, as bytes."""
    return checkpoint.encode({"report": np.zeros(linear.plan().report.size, np.float32)})


def signature_of(headers):
    """The signature of a request."""
    fields = {name.lower(): value for name, value in headers.items()}
    return Signature.parse(fields["signature-input"], fields["signature"])


def nonce_of(headers):
    """The nonce of a request's signature."""
    return signature_of(headers).nonce
