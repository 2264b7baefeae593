from __future__ import annotations

import base64
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import httpx2
import msgspec
import numpy as np
import pytest

from fedcore import checkpoint
from fedcore.batching import StreamKey
from fedcore.compression import quantise
from fedcore.plan import BlobRef
from fedcore.wire import messages
from fedcore.wire.messages import PROBLEM_TYPE, PROBLEMS, Abort, Assignment, CheckIn, Problem
from tests.coordinator.bundles import START, make_bundle, make_plan, report_body, report_vector
from tests.coordinator.conftest import committed
from tests.coordinator.devices import CAPABILITIES

every_engine = pytest.mark.every_engine


def refused(response, slug):
    """The response is the problem document `slug`, whole."""
    assert response.headers["content-type"] == PROBLEM_TYPE
    document = msgspec.json.decode(response.content, type=Problem)
    assert (document.slug, document.status, document.title) == (slug, response.status_code, PROBLEMS[slug].title)
    assert document.detail
    return document


def check_in(client, device="a", population="phones", **able):
    """The answer to a check-in. While another transaction holds the database, a coordinator cannot take a new
    population; devices ask again."""
    until = monotonic() + 30
    while (answer := check_in_once(client, device, population, **able)).status_code == 503 and monotonic() < until:
        sleep(0.1)
    return answer


def check_in_once(client, device="a", population="phones", **able):
    message = CheckIn(capabilities=msgspec.structs.replace(CAPABILITIES, **able), examples={"default": 10})
    content = messages.encode(message)
    return client.post(f"/v1/populations/{population}/checkins", content=content, auth=client.devices[device])


def ask(client, session, device="a", **how):
    answer = client.post(f"/v1/sessions/{session}/assignments", auth=client.devices[device], **how)
    if answer.json().get("outcome") == "assigned":
        client.devices.of[answer.json()["assignment"]] = device
    return answer


def wait(client, device="a", seconds=4, population="phones"):
    answer = check_in(client, device, population)
    assert "session" in answer.json(), (answer.status_code, answer.text)
    session = answer.json()["session"]
    return ask(client, session, device, headers={"Prefer": f"wait={seconds}"})


def blob(client, sha256, **headers):
    return client.get(f"/v1/blobs/{sha256}", headers=headers, auth=client.devices["a"])


def assign(client, *devices, population="phones"):
    with ThreadPoolExecutor(len(devices)) as pool:
        answers = list(pool.map(lambda device: wait(client, device, 20, population), devices))
    return sorted((messages.decode(a.content, Assignment) for a in answers), key=lambda assignment: assignment.slot)


def digest_of(body):
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def put(client, assignment, body, digest=None):
    headers = {"Content-Digest": digest or digest_of(body)}
    owner = client.devices.owner(assignment)
    return client.put(f"/v1/assignments/{assignment}/report", content=body, headers=headers, auth=owner)


def abort(client, assignment, reason="runtime-failed"):
    owner = client.devices.owner(assignment)
    return client.post(f"/v1/assignments/{assignment}:abort", content=messages.encode(Abort(reason)), auth=owner)


@every_engine
def test_a_checkpoint_is_served_as_the_delta_to_an_earlier_one(store, register, client, tmp_path):
    size = 4000
    plan = make_plan(size)
    start, move = np.linspace(1, 2, size, dtype=np.float32), np.full(size, 1e-3, np.float32)
    task = register(make_bundle(tmp_path / "large", plan, start=start), goal=1, rounds=1)
    (given,) = assign(client, "a")
    report = {"report": report_vector(move, 1, plan=plan)}
    assert put(client, given.assignment, checkpoint.encode(report)).status_code == 200
    committed(store, task, 1)
    before, after = given.checkpoint.sha256, store.rounds(task)[0].checkpoint_sha256
    answer = blob(client, f"{after}/deltas/{before}")
    assert len(answer.content) < 0.9 * given.checkpoint.size
    whole = blob(client, after).content
    assert checkpoint.applied(answer.content, blob(client, before).content, BlobRef.of(whole)) == whole
    assert blob(client, f"{after}/deltas/{before}").content == answer.content
    for other in ("0" * 64, given.plan.sha256, "nonsense"):
        refused(blob(client, f"{after}/deltas/{other}"), "unknown-blob")


def test_quantised_reports_are_counted_and_damaged_ones_refused(store, register, client, tmp_path):
    plan = make_plan()
    layout = msgspec.structs.replace(plan.report, bits=8)
    bundle = make_bundle(tmp_path / "quantised", msgspec.structs.replace(plan, report=layout))
    task = register(bundle, goal=1, rounds=1)
    (given,) = assign(client, "a")
    key = StreamKey(given.seed, given.round, given.slot)
    body = quantise(layout, report_vector([2.55, 0, 1, 0], 1), key)
    assert len(body) == 4 + 8 + 12
    refused(put(client, given.assignment, body[:-1]), "invalid-report")
    refused(put(client, given.assignment, b"\xff" * len(body)), "invalid-report")
    refused(put(client, given.assignment, report_body([1, 0, 0, 0], 1)), "too-large")
    assert put(client, given.assignment, body).status_code == 200
    moved = committed(store, task, 1) - START
    np.testing.assert_allclose(moved, [2.55, 0, 1, 0], atol=0.011)


@every_engine
def test_round_over_http_equals_exact_arithmetic(store, register, client):
    task = register(goal=2, rounds=1)
    first, second = assign(client, "a", "b")
    params = checkpoint.decode(blob(client, first.checkpoint.sha256).content, [checkpoint.VectorSpec("params", 4)])
    np.testing.assert_array_equal(params["params"], START)
    assert first.plan.check(blob(client, first.plan.sha256).content)
    body = report_body([1, 0, 0, 0], 1)
    receipt = put(client, first.assignment, body)
    assert receipt.status_code == 200
    assert receipt.json()["sha256"] == hashlib.sha256(body).hexdigest()
    assert put(client, second.assignment, report_body([0, 2, 0, 0], 3)).status_code == 200
    np.testing.assert_array_equal(committed(store, task, 1), START + np.array([0.25, 1.5, 0, 0]))
    assert put(client, first.assignment, body).content == receipt.content


@every_engine
def test_device_whose_connection_breaks_may_wait_again(register, client):
    register(goal=2)
    session = check_in(client).json()["session"]
    with pytest.raises(httpx2.ReadTimeout):
        ask(client, session, headers={"Prefer": "wait=5"}, timeout=0.2)
    deadline = monotonic() + 30
    while (again := ask(client, session)).status_code == 404:  # it waits still: nobody has noticed yet
        assert monotonic() < deadline
    assert again.json()["reason"] == "not-selected"


def test_wait_is_capped_applied_and_answered_when_nothing_comes(register, client):
    register(goal=2)
    started = monotonic()
    answer = wait(client, seconds=1)
    assert monotonic() - started > 0.9
    assert answer.headers["preference-applied"] == "wait=1"
    rejected = answer.json()
    token = rejected.pop("token")
    assert rejected == {"outcome": "rejected", "reason": "not-selected", "retry": {"min_s": 3.0, "max_s": 3.0}}
    early = check_in(client).json()
    assert (early["reason"], early["retry"], early["token"]) == ("too-early", {"min_s": 3.0, "max_s": 3.0}, token)
    session = check_in(client, "b").json()["session"]
    assert "preference-applied" not in ask(client, session, "b").headers


def test_device_without_a_fitting_format_hears_which_would_fit(register, client):
    register()
    rejected = {"outcome": "rejected", "reason": "unsupported-format", "retry": {"min_s": 3.0, "max_s": 3.0}}
    answer = check_in(client, formats=("executorch",)).json()
    assert answer == rejected | {"formats": ["onnx"], "token": answer["token"]}


def test_preference_is_read_as_rfc_7240_writes_it_and_capped(register, client):
    register(goal=1, rounds=9)
    for text, applied in [("respond-async, WAIT=2", "wait=2"), ('wait="3"', "wait=3"), ("wait=999", "wait=5")]:
        session = check_in(client).json()["session"]
        answer = ask(client, session, headers={"Prefer": text})
        assert answer.headers.get("preference-applied") == applied
        assert put(client, answer.json()["assignment"], report_body([0, 0, 0, 0], 1)).status_code == 200


def test_device_that_breaks_the_connection_while_waiting_is_not_selected(store, register, client):
    task = register(goal=1, minimum=1, over_selection=2, selection_timeout_s=0.5)
    session = check_in(client, "gone").json()["session"]
    with pytest.raises(httpx2.ReadTimeout):
        ask(client, session, "gone", headers={"Prefer": "wait=5"}, timeout=0.1)
    assert wait(client, "here").json()["outcome"] == "assigned"
    assert [seat.device for seat in store.cohort(task, 1)] == [client.devices.id("here")]


@every_engine
def test_unknown_population_session_assignment_and_blob_are_named(register, client):
    refused(check_in(client), "unknown-population")
    register()
    refused(ask(client, "nope"), "unknown-session")
    refused(put(client, "nope", b"x"), "unknown-assignment")
    refused(abort(client, "nope"), "unknown-assignment")
    for digest in ("0" * 64, "nope", "..%2f..%2fstate.db"):
        response = blob(client, digest)
        assert response.status_code == 404
        assert response.headers["content-type"] == PROBLEM_TYPE


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "truncated"),
        (b"\xff", "invalid character"),
        (b"[]", "object"),
        (b'{"capabilities": 1, "examples": {}}', "capabilities"),
        (b'{"capabilities": {"runtime": ""}, "examples": {}}', "runtime"),
        (b'{"examples": {}}', "capabilities"),
        (b'{"version": 2, "capabilities": ' + messages.encode(CAPABILITIES) + b', "examples": {}}', "version 2"),
    ],
)
def test_malformed_message_is_refused_and_says_where(register, client, body, says):
    register()
    response = client.post("/v1/populations/phones/checkins", content=body, auth=client.devices["a"])
    assert says in refused(response, "malformed-message").detail.lower()


def test_oversized_bodies_are_refused_declared_or_streamed(register, client):
    register(goal=1)
    (assignment,) = assign(client, "a")
    large = b"x" * 10_000
    url, signed = "/v1/populations/phones/checkins", client.devices["a"]
    refused(client.post(url, content=large, auth=signed), "too-large")
    refused(client.post(url, content=iter([large]), auth=signed), "too-large")
    refused(put(client, assignment.assignment, large), "too-large")


@every_engine
def test_wrong_reports_are_refused_and_the_right_one_still_counts(store, register, client):
    task = register(goal=1, rounds=1)
    (assignment,) = assign(client, "a")
    body = report_body([1, 0, 0, 0], 1)
    url = f"/v1/assignments/{assignment.assignment}/report"
    bad = checkpoint.encode({"report": np.full(7, np.nan, np.float32)})
    refused(client.put(url, auth=client.devices["a"]), "malformed-message")
    refused(put(client, assignment.assignment, body, "sha-256=:short:"), "malformed-signature")
    refused(put(client, assignment.assignment, body, digest_of(b"other")), "digest-mismatch")
    refused(put(client, assignment.assignment, bad), "invalid-report")
    refused(put(client, assignment.assignment, b"junk"), "invalid-report")
    for wrong in ({"report": np.zeros(6, np.float32)}, {"update": np.zeros(7, np.float32)}):
        refused(put(client, assignment.assignment, checkpoint.encode(wrong)), "invalid-report")
    assert store.rounds(task)[0].reported == 0
    digest = f"sha-512=:AAAA:, {digest_of(body)}"
    assert put(client, assignment.assignment, body, digest).status_code == 200
    np.testing.assert_array_equal(committed(store, task, 1), START + np.array([1, 0, 0, 0]))


@every_engine
def test_conflicting_late_and_aborted_reports_are_refused(register, client):
    register(goal=1, over_selection=3)
    first, second, third = assign(client, "a", "b", "c")
    assert abort(client, third.assignment).status_code == 204
    assert abort(client, third.assignment).status_code == 204
    gone = refused(put(client, third.assignment, report_body([0, 0, 0, 0], 1)), "no-longer-needed")
    assert (gone.retry.min_s, gone.retry.max_s) == (3.0, 3.0)
    assert put(client, first.assignment, report_body([1, 0, 0, 0], 1)).status_code == 200
    refused(put(client, first.assignment, report_body([2, 0, 0, 0], 1)), "conflicting-report")
    late = put(client, second.assignment, report_body([0, 0, 0, 0], 1))
    refused(late, "no-longer-needed")
    assert late.headers["retry-after"] == "3"


@every_engine
def test_blob_answers_conditions_and_ranges(store, register, client):
    sha256 = store.task(register()).plan_sha256
    etag = f'"{sha256}"'
    whole = blob(client, sha256)
    assert (whole.status_code, whole.headers["etag"]) == (200, etag)
    assert "immutable" in whole.headers["cache-control"]
    data, size = whole.content, len(whole.content)
    for known in (etag, f'"other", W/{etag}', "*"):
        unchanged = blob(client, sha256, **{"If-None-Match": known})
        assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    for wanted, part in [
        ("bytes=0-4", data[:5]),
        ("bytes=5-", data[5:]),
        ("bytes=-7", data[-7:]),
        (f"bytes=3-{size + 9}", data[3:]),
        (f"bytes=-{size + 9}", data),
        ("bytes=3-" + 5000 * "9", data[3:]),
        ("bytes=-" + 5000 * "9", data),
    ]:
        response = blob(client, sha256, **{"Range": wanted, "If-Range": etag})
        assert (response.status_code, response.content) == (206, part)
        start = size - len(part) if wanted[6] == "-" else int(wanted[6])
        assert response.headers["content-range"] == f"bytes {start}-{start + len(part) - 1}/{size}"
    for ignored in ({"Range": "bytes=9-1"}, {"Range": "lines=1-2"}, {"Range": "bytes=0-1,3-4"}, {"Range": "bytes=-"}):
        assert blob(client, sha256, **ignored).content == data
    assert blob(client, sha256, **{"Range": "bytes=0-1", "If-Range": '"other"'}).content == data
    for outside in (f"bytes={size}-", "bytes=-0", f"bytes={5000 * '9'}-", f"bytes={5000 * '9'}-{5000 * '9'}"):
        response = blob(client, sha256, Range=outside)
        refused(response, "range-not-satisfiable")
        assert response.headers["content-range"] == f"bytes */{size}"


@every_engine
def test_numbers_of_thousands_of_digits_are_refused_or_ignored(register, client):
    register(goal=1, rounds=1)
    (given,) = assign(client, "a")
    auth, path, many = client.devices["a"], f"/v1/assignments/{given.assignment}", 5000 * "9"
    assert client.get(path, headers={"Prefer": f"wait={many}"}, auth=auth).status_code == 204
    refused(client.get(f"{path}/secagg/{many}", auth=auth), "malformed-message")
    part = {"Upload-Offset": "0", "Upload-Length": "9", "Upload-Complete": "?1", "Repr-Digest": digest_of(b"x")}
    for name in ("Upload-Offset", "Upload-Length"):
        refused(
            client.patch(f"{path}/report", content=b"x", headers=part | {name: many}, auth=auth), "malformed-message"
        )
    check_in_with = f'{{"capabilities": {{}}, "examples": {{"default": {1500 * "9"}}}}}'.encode()
    refused(client.post("/v1/populations/phones/checkins", content=check_in_with, auth=auth), "malformed-message")


def test_server_state_is_not_served_to_devices(register, client, tmp_path):
    adam = make_bundle(tmp_path / "adam", algorithm="fedadam")
    register(adam)
    refused(blob(client, adam.manifest.state.sha256), "unknown-blob")


@every_engine
def test_cancel_is_seen_by_the_running_service(store, register, client):
    task = register(goal=1)
    (assignment,) = assign(client, "a")
    store.cancel(task)
    waiting = [check_in(client).json().get("reason")]
    while waiting[-1] != "no-task" and len(waiting) < 500:
        waiting.append(check_in(client).json().get("reason"))
    assert waiting[-1] == "no-task"
    refused(put(client, assignment.assignment, report_body([0, 0, 0, 0], 1)), "no-longer-needed")
    assert store.rounds(task)[0].reason == "cancelled"


def test_framework_errors_are_problem_documents_too(client):
    refused(client.get("/nothing/here"), "unknown-resource")
    wrong = client.get("/v1/populations/phones/checkins")
    refused(wrong, "method-not-allowed")
    assert wrong.headers["allow"] == "POST"


def test_a_refused_method_is_told_every_method_of_the_address(client):
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        answer = client.delete(re.sub(r"\{.*?\}", "7", path))
        refused(answer, "method-not-allowed")
        assert {method.upper() for method in methods} <= set(answer.headers["allow"].split(", ")), path


@pytest.mark.parametrize("address", ["/v1/devices/", "/v1/populations/phones/checkins/", "/v1/devices%0A"])
def test_an_address_that_is_nearly_one_is_none_and_leads_nowhere(client, address):
    answer = client.post(address)
    refused(answer, "unknown-resource")
    assert "location" not in answer.headers


def test_bug_is_a_problem_document_that_gives_nothing_away(client, monkeypatch):
    def broken(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr("coordinator.store.records.records.Records.blob", broken)
    assert "secret" not in refused(blob(client, "0" * 64), "internal").detail


def test_bug_in_the_driver_refuses_and_the_driver_lives_on(register, client, monkeypatch):
    register()
    with monkeypatch.context() as patch:
        patch.setattr("coordinator.driver.memory.sessions.Sessions.enter", None)
        refused(check_in_once(client), "unavailable")
    assert check_in(client).json()["outcome"] == "accepted"


@every_engine
def test_health_and_readiness(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}


@every_engine
@pytest.mark.parametrize("path", ["/v1/blobs/%00", "/v1/assignments/%00/report", "/v1/populations/%00/checkins"])
def test_a_path_with_a_nul_is_refused_and_not_asked_of_the_database(path, client):
    method = "POST" if path.endswith("checkins") else "GET"
    refused(client.request(method, path, auth=client.devices["a"]), "malformed-message")
