import typing

import msgspec
import pytest

from fedcore.conditions import StatedConditions
from fedcore.errors import WireError
from fedcore.plan import BlobRef, PlanSignature
from fedcore.wire import messages

REJECTED = messages.Rejected("no-task", messages.RetryWindow(10, 20))
ABLE = messages.StatedCapabilities(runtime="test", version="1", engine="none", formats=("onnx",), memory_mb=2048)
CHECK_IN = messages.CheckIn(capabilities=ABLE, examples={"default": 12})
ASSIGNMENT = messages.Assignment(
    assignment="a1",
    task="t1",
    round=3,
    attempt=0,
    slot=7,
    seed=2**63 - 1,
    plan=BlobRef.of(b"plan"),
    checkpoint=BlobRef.of(b"checkpoint"),
    report_within_s=60,
)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (CHECK_IN, messages.CheckIn),
        (
            msgspec.structs.replace(CHECK_IN, conditions=StatedConditions(charging=True, unmetered=False, battery=0.8)),
            messages.CheckIn,
        ),
        (msgspec.structs.replace(CHECK_IN, labels={"app_version": "3.2.1", "region": "eu"}), messages.CheckIn),
        (messages.Accepted("s1"), messages.CheckInAnswer),
        (REJECTED, messages.CheckInAnswer),
        (
            messages.Rejected("unsupported-format", messages.RetryWindow(1, 2), "shown", ("onnx", "executorch")),
            messages.CheckInAnswer,
        ),
        (ASSIGNMENT, messages.AssignmentAnswer),
        (
            msgspec.structs.replace(ASSIGNMENT, plan_signature=PlanSignature("s", "v"), minimum=20, target="a = b"),
            messages.AssignmentAnswer,
        ),
        (REJECTED, messages.AssignmentAnswer),
        (messages.Receipt(assignment="a1", task="t1", round=3, sha256="00" * 32), messages.Receipt),
        (messages.Abort("runtime-failed"), messages.Abort),
    ],
)
def test_a_message_comes_back_as_it_was(message, kind):
    assert messages.decode(messages.encode(message), kind) == message


def test_a_problem_comes_back_as_it_was_and_nothing_else_is_one():
    document = messages.problem("no-longer-needed", "the round is over", messages.RetryWindow(1, 2))
    assert messages.decode_problem(messages.encode(document)) == document
    for wrong in (b"{}", b"\xff", b"[" * 100_000):
        with pytest.raises(WireError):
            messages.decode_problem(wrong)


def test_answers_say_their_outcome():
    outcomes = [
        msgspec.json.decode(messages.encode(answer))["outcome"]
        for answer in (messages.Accepted("s1"), REJECTED, ASSIGNMENT)
    ]
    assert outcomes == ["accepted", "rejected", "assigned"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capabilities": 5}, r"Expected `object`, got `int` - at `\$\.capabilities`"),
        ({"capabilities": {"runtime": ""}}, r"at `\$\.capabilities\.runtime`"),
        ({"examples": {"default": "many"}}, r"at `\$\.examples"),
        ({"conditions": {"battery": 80}}, r"at `\$\.conditions\.battery`"),
        ({"version": 2}, "message version 2 is unknown here; this side speaks version 1"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    raw = msgspec.json.encode(msgspec.json.decode(messages.encode(CHECK_IN)) | change)
    with pytest.raises(WireError, match=message):
        messages.decode(raw, messages.CheckIn)


@pytest.mark.parametrize(("field", "kind"), [("capabilities", messages.CheckIn), ("examples", messages.CheckIn)])
def test_a_missing_field_is_named(field, kind):
    raw = msgspec.json.decode(messages.encode(CHECK_IN))
    del raw[field]
    with pytest.raises(WireError, match=f"missing required field `{field}`"):
        messages.decode(msgspec.json.encode(raw), kind)


def test_a_field_that_this_version_does_not_know_is_ignored():
    raw = msgspec.json.decode(messages.encode(CHECK_IN)) | {"battery": 0.8}
    assert messages.decode(msgspec.json.encode(raw), messages.CheckIn) == CHECK_IN


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"\xff", b'{"device": "\xff"}', b"{" * 2000, b'{"x":' + b"[" * 100_000], ids=range(7)
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(WireError):
        messages.decode(data, messages.CheckIn)


def test_an_answer_of_unknown_outcome_is_refused():
    with pytest.raises(WireError, match="outcome"):
        messages.decode(b'{"outcome": "perhaps"}', messages.AssignmentAnswer)


@pytest.mark.parametrize(
    ("kind", "body"), [(messages.Abort, b'{"reason": "bored"}'), (messages.Rejected, b'{"reason": "bored"}')]
)
def test_a_reason_that_is_not_registered_is_refused(kind, body):
    raw = msgspec.json.decode(body) | ({"outcome": "rejected", "retry": {"min_s": 0, "max_s": 1}})
    with pytest.raises(WireError, match=r"Invalid enum value 'bored' - at `\$\.reason`"):
        messages.decode(msgspec.json.encode(raw), kind)


@pytest.mark.parametrize("slug", messages.PROBLEMS)
def test_a_problem_document_carries_its_registered_status_and_title(slug):
    document = messages.problem(slug, "detail")
    assert document.type == messages.URN + slug
    assert document.slug == slug
    assert (document.status, document.title) == (messages.PROBLEMS[slug].status, messages.PROBLEMS[slug].title)
    assert 400 <= document.status < 600
    assert "retry" not in msgspec.json.decode(messages.encode(document))


def test_an_unregistered_problem_cannot_be_made():
    with pytest.raises(KeyError):
        messages.problem("bad-luck", "detail")


def test_reasons_are_lower_case_words():
    for reasons in (messages.RejectionReason, messages.AbortReason):
        assert all(reason.replace("-", "").islower() for reason in typing.get_args(reasons))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in ("round", "attempt", "slot", "seed") for value in (-1, 2**63)),
        ("round", 2**31),
        ("attempt", 2**32),
        ("report_within_s", 1e308),
    ],
)
def test_numbers_of_an_assignment_that_no_device_can_use_are_refused(field, value):
    blob = BlobRef("ab" * 32, 1)
    good = messages.Assignment(
        assignment="a", task="t", round=1, attempt=1, slot=0, seed=0, plan=blob, checkpoint=blob, report_within_s=1
    )
    hostile = msgspec.json.encode(msgspec.json.decode(messages.encode(good)) | {field: value})
    assert messages.decode(messages.encode(good), messages.Assignment) == good
    with pytest.raises(WireError, match=field):
        messages.decode(hostile, messages.Assignment)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "AB" * 32, "ab" * 31])
def test_a_blob_is_named_by_a_digest_and_nothing_else(digest):
    with pytest.raises(msgspec.ValidationError, match="sha256"):
        msgspec.json.decode(msgspec.json.encode({"sha256": digest, "size": 1}), type=BlobRef)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({f"n{number}": "v" for number in range(17)}, "17 labels are too many: a device has at most 16"),
        ({"Region": "eu"}, "label 'Region': a name has 1 to 32"),
        ({"n" * 33: "v"}, f"label '{'n' * 33}': a name has 1 to 32"),
        ({"region\n": "eu"}, r"label 'region\n': a name has 1 to 32"),
        ({"region": "ü" * 33}, "label region: its value must have 1 to 64 bytes, not 66"),
        ({"region": ""}, "label region: its value must have 1 to 64 bytes, not 0"),
        ({"region": "e\x85u"}, "label region: its value must be text without control characters"),
    ],
)
def test_labels_beyond_their_limits_are_refused_by_name(labels, words):
    text = messages.encode(CHECK_IN)[:-1] + b',"labels":' + msgspec.json.encode(labels) + b"}"
    with pytest.raises(WireError) as refused:
        messages.decode(text, messages.CheckIn)
    assert words in str(refused.value)


def test_labels_up_to_their_limits_are_read():
    labels = {"n" + "_" * 31: "ü" * 32} | {f"n{number}": "v" for number in range(15)}
    told = msgspec.structs.replace(CHECK_IN, labels=labels)
    assert messages.decode(messages.encode(told), messages.CheckIn) == told


def test_without_labels_and_target_messages_are_those_of_before():
    assert b"labels" not in messages.encode(CHECK_IN)
    assert b"target" not in messages.encode(ASSIGNMENT)
