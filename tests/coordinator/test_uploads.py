"""Reports that arrive in parts: offsets, cut connections, other requests, and memory that is bounded and let go."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from coordinator.api import http
from coordinator.api.devices import reports
from coordinator.api.devices.reports import Part, Uploads
from coordinator.api.limits import MemoryBudget
from coordinator.errors import ConflictingReport, NoLongerNeeded, TooLarge, Unavailable
from coordinator.settings import Settings
from coordinator.store.tables import ASSIGNMENTS
from device_runtime.protocol import transport
from device_runtime.protocol.transport import Transport
from fedcore import checkpoint
from fedcore.wire import messages
from fedcore.wire.messages import Receipt
from fedcore.wire.signatures import content_digest
from ingress import limits
from tests.coordinator.bundles import START, make_bundle, make_plan, report_body, report_vector
from tests.coordinator.conftest import committed
from tests.coordinator.connections import begun, hung_up
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import abort, assign, put, refused
from tests.servers import serving

BODY = report_body([1, 0, 0, 0], 1)
HALF = len(BODY) // 2


def url_of(assignment):
    return f"/v1/assignments/{assignment}/report"


def about(offset, last="?1", body=BODY, **changes):
    fields = {"Upload-Offset": str(offset), "Upload-Complete": last, "Upload-Length": str(len(body))}
    return fields | {"Repr-Digest": content_digest(body)} | changes


def patch(client, assignment, offset, stop=None, last="?1", body=BODY, **changes):
    owner = client.devices.owner(assignment)
    headers = about(offset, last, body, **changes)
    return client.patch(url_of(assignment), content=body[offset:stop], headers=headers, auth=owner)


def head(client, assignment):
    return client.head(url_of(assignment), auth=client.devices.owner(assignment))


def offset(client, assignment):
    answer = head(client, assignment)
    assert (answer.status_code, answer.headers["upload-complete"]) == (204, "?0")
    assert answer.headers["cache-control"] == "no-store"
    return int(answer.headers["upload-offset"])


@pytest.fixture
def given(register, client):
    """An assignment that wants a report."""
    register(goal=1, rounds=1)
    (one,) = assign(client, "a")
    return one.assignment


def test_a_report_in_parts_counts_as_one_in_one_request_does(store, register, client):
    task = register(goal=1, rounds=1)
    (one,) = assign(client, "a")
    given = one.assignment
    assert offset(client, given) == 0
    first = patch(client, given, 0, HALF, "?0")
    assert (first.status_code, first.headers["upload-offset"]) == (204, str(HALF))
    assert offset(client, given) == HALF
    last = patch(client, given, HALF)
    assert (last.status_code, last.headers["upload-complete"]) == (200, "?1")
    np.testing.assert_array_equal(committed(store, task, 1), START + np.array([1, 0, 0, 0]))
    assert head(client, given).headers["upload-complete"] == "?1"
    for again in (patch(client, given, len(BODY)), patch(client, given, 0), put(client, given, BODY)):
        assert again.content == last.content
    refused(patch(client, given, 0, body=report_body([2, 0, 0, 0], 1)), "conflicting-report")


def test_a_part_that_does_not_follow_is_told_where_to_go_on(client, given):
    patch(client, given, 0, HALF, "?0")
    for wrong in (0, HALF - 1, HALF + 1, len(BODY)):
        answer = patch(client, given, wrong)
        refused(answer, "mismatching-offset")
        assert answer.headers["upload-offset"] == str(HALF)
    assert patch(client, given, HALF).status_code == 200


def begin(client, method, assignment, body, stop, **headers):
    """A connection on which a request's head was sent, and its body up to `stop`."""
    return begun(client, client.devices.owner(assignment), method, url_of(assignment), body[:stop], body, **headers)


def cut(client, assignment, start, stop):
    """Send the beginning of a PATCH, and hang up in the middle of its body."""
    with begin(client, "PATCH", assignment, BODY[start:], stop - start, **about(start)):
        until = time.monotonic() + 30
        while offset(client, assignment) != stop:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_what_came_before_a_connection_broke_stays(client, given):
    cut(client, given, 0, 40)
    assert offset(client, given) == 40
    cut(client, given, 40, 90)
    assert patch(client, given, 90).status_code == 200


def test_report_other_than_the_announced_one_is_dropped(client, given):
    patch(client, given, 0, HALF, "?0")
    refused(patch(client, given, HALF, body=BODY[:-1] + b"\1"), "conflicting-report")
    refused(patch(client, given, HALF, len(BODY) - 1), "digest-mismatch")
    assert offset(client, given) == 0
    wrong = {"Content-Digest": content_digest(b"other")}
    refused(patch(client, given, 0, **wrong), "digest-mismatch")
    assert offset(client, given) == 0
    junk = b"junk" * 10
    refused(patch(client, given, 0, body=junk), "invalid-report")
    assert patch(client, given, 0).status_code == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"Upload-Offset": "-1"},
        {"Upload-Offset": "x"},
        {"Upload-Length": ""},
        {"Upload-Complete": "1"},
        {"Repr-Digest": "sha-256=:x:"},
        {"Upload-Length": str(len(BODY) - 1)},
    ],
)
def test_a_part_that_is_badly_announced_is_refused(client, given, changes):
    refused(patch(client, given, 0, **changes), "malformed-message")


def test_what_a_part_says_of_itself_is_signed(client, given):
    owner = client.devices.owner(given)
    request = client.build_request("PATCH", url_of(given), content=BODY, headers=about(0))
    request.headers["Content-Digest"] = content_digest(BODY)
    owner.sign(request)
    request.headers["Upload-Offset"] = "5"
    refused(client.send(request), "forged-signature")
    request = client.build_request("PATCH", url_of(given), content=BODY)
    request.headers["Content-Digest"] = content_digest(BODY)
    owner.sign(request)
    request.headers.update(about(0))
    refused(client.send(request), "malformed-signature")


def test_report_too_large_foreign_or_unwanted_is_refused_unsent(client, given):
    large = b"x" * 100_000
    refused(patch(client, given, 0, body=large), "too-large")
    client.devices.of[given] = "b"
    refused(patch(client, given, 0), "foreign-assignment")
    foreign = head(client, given)
    assert (foreign.status_code, foreign.headers["muster-problem"]) == (403, "foreign-assignment")
    client.devices.of[given] = "a"
    abort(client, given)
    refused(patch(client, given, 0), "no-longer-needed")
    assert head(client, given).status_code == 410
    assert head(client, "nobody").status_code == 404


@pytest.mark.promise("An interrupted upload resumes, counts once, and stays within its memory")
def test_reports_in_transit_keep_to_their_memory_and_release_it(store, register, database, tmp_path):
    register(goal=3, minimum=2, rounds=1)
    place = {"database": database, "keys": tmp_path / "keys", "blobs": tmp_path / "blobs", "port": 0}
    with serving(Settings(**place, reports_bytes=9000)) as url, speaking_to(url) as client:
        given = [one.assignment for one in assign(client, "a", "b", "c")]
        body = report_body([1, 0, 0, 0], 1)
        large = [patch(client, one, 0, 10, "?0", **{"Upload-Length": "4000"}) for one in given]
        assert [one.status_code for one in large] == [204, 204, 503]
        assert refused(large[2], "unavailable").retry is not None
        refused(put(client, given[2], body), "unavailable")
        abort(client, given[0])
        until = time.monotonic() + 30
        while (answered := put(client, given[2], body)).status_code == 503:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert messages.decode(answered.content, Receipt).assignment == given[2]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_device_silent_in_mid_body_loses_its_place_to_another(register, database, tmp_path, monkeypatch, method):
    register(goal=2, rounds=1)
    place = {"database": database, "keys": tmp_path / "keys", "blobs": tmp_path / "blobs", "port": 0}
    with serving(Settings(**place, reports_bytes=4200 + len(BODY))) as url, speaking_to(url) as client:
        mine, theirs = (one.assignment for one in assign(client, "a", "b"))
        headers = about(0) if method == "PATCH" else {}
        with monkeypatch.context() as shorter:
            shorter.setattr(limits, "WINDOW_S", 0.3)
            shorter.setattr(limits, "LOOK_S", 0.05)
            silent = begin(client, method, mine, BODY, 40, **headers)
            assert hung_up(silent)
        with silent:
            if method == "PATCH":
                assert offset(client, mine) == 40  # it may go on
            assert put(client, theirs, BODY).status_code == 200


def test_receipt_asked_for_again_is_of_the_same_counting(client, given, monkeypatch):
    counting, may_end, times = threading.Event(), threading.Event(), []

    def slowly(data, layout, **known):
        times.append(len(data))
        counting.set()
        assert may_end.wait(5)
        return parse(data, layout, **known)

    parse = reports.parse_report
    monkeypatch.setattr(reports, "parse_report", slowly)
    monkeypatch.setattr(http, "_SMALL_BYTES", 0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(patch, client, given, 0)
        assert counting.wait(5)
        assert offset(client, given) == len(BODY)
        again = pool.submit(patch, client, given, len(BODY))
        with suppress(TimeoutError):
            again.result(0.3)
        may_end.set()
        assert first.result(5).content == again.result(5).content
    assert times == [len(BODY)]


def test_report_that_ends_its_round_is_answered_however_late(store, register, database, tmp_path, monkeypatch):
    async def late(self, *args, **known):
        receipt = await count(self, *args, **known)
        await asyncio.to_thread(committed, store, task, 1)
        await asyncio.sleep(0.2)  # the reports on their way are looked through meanwhile
        return receipt

    count = reports.ReportApi._count
    monkeypatch.setattr(reports.ReportApi, "_count", late)
    monkeypatch.setattr(reports, "_SWEEP_S", 0.02)
    task = register(goal=1, rounds=1)
    place = {"database": database, "keys": tmp_path / "keys", "blobs": tmp_path / "blobs", "port": 0}
    with serving(Settings(**place)) as url, speaking_to(url) as client:
        (given,) = assign(client, "a")
        assert put(client, given.assignment, BODY).status_code == 200


def test_an_assignment_without_a_row_does_not_keep_the_parts_of_others(
    store, register, database, tmp_path, monkeypatch
):
    monkeypatch.setattr(reports, "_SWEEP_S", 0.02)
    register(goal=3, rounds=1)
    place = {"database": database, "keys": tmp_path / "keys", "blobs": tmp_path / "blobs", "port": 0}
    with serving(Settings(**place, reports_bytes=9000)) as url, speaking_to(url) as client:
        gone, over, mine = (one.assignment for one in assign(client, "a", "b", "c"))
        for one in (gone, over):
            assert patch(client, one, 0, 10, "?0", **{"Upload-Length": "3000"}).status_code == 204
        refused(put(client, mine, BODY), "unavailable")
        with store.database.engine.begin() as connection:
            connection.execute(ASSIGNMENTS.delete().where(ASSIGNMENTS.c.id == gone))
        until = time.monotonic() + 30
        while put(client, mine, BODY).status_code == 503:
            assert time.monotonic() < until
            time.sleep(0.02)


class Cutter:
    """A road to a coordinator that carries so many bytes of each upload, and then breaks; later ones get through."""

    def __init__(self, client, *cuts):
        self.target = client.base_url.host, client.base_url.port
        self.cuts = list(cuts)
        self.carried = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.threads = []

    def __enter__(self):
        self._start(self._listen)
        return self

    def __exit__(self, *_):
        self.socket.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        self.socket.close()

    def _start(self, work, *given):
        self.threads.append(threading.Thread(target=work, args=given))
        self.threads[-1].start()

    def _listen(self):
        with suppress(OSError):
            while True:
                here, _ = self.socket.accept()
                self._start(self._connect, here)

    def _connect(self, here):
        with here, socket.create_connection(self.target) as there:
            back = threading.Thread(target=self._pass, args=(there, here))
            back.start()
            with suppress(OSError):
                self._carry(here, there)
            for end in (here, there):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join()

    def _carry(self, source, sink):
        """From the device on, until it ends or breaks."""
        left = None
        while left != 0 and (data := source.recv(min(left or 1 << 16, 1 << 16))):
            sink.sendall(data)
            self.carried += len(data)
            if data.startswith(b"PATCH") and self.cuts:
                left = self.cuts.pop(0)
            elif left is not None:
                left -= len(data)
        time.sleep(0.05)  # as on a network, what was sent arrives before the end does

    def _pass(self, source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)


class Known:
    """A device that is enrolled already."""

    def __init__(self, signer):
        self.signer = lambda _: signer


@pytest.mark.promise("An interrupted upload resumes, counts once, and stays within its memory")
def test_upload_over_a_breaking_connection_resumes_and_arrives_once(store, register, client, tmp_path):
    plan = make_plan(2_500_000)
    start = np.zeros(2_500_000, np.float32)
    task = register(make_bundle(tmp_path / "large", plan=plan, start=start), goal=1, rounds=1)
    (one,) = assign(client, "a")
    report = checkpoint.encode({"report": report_vector(start + 0.25, 1, plan=plan)})
    assert len(report) > transport.LARGEST_WHOLE
    with Cutter(client, 3_000_000, 4_000_000) as road, Transport.to(road.url) as device:
        device.identity = Known(client.devices["a"].signer)
        receipt = device.report(one.assignment, report, hashlib.sha256(report).hexdigest())
        assert road.cuts == []
        assert receipt.sha256 == hashlib.sha256(report).hexdigest()
        assert road.carried < len(report) + 500_000
    np.testing.assert_array_equal(committed(store, task, 1), start + 0.25)
    assert [record.reported for record in store.rounds(task)] == [1]


def part(offset=0, length=10, sha256=bytes(32)):
    return Part(offset, last=False, length=length, sha256=sha256)


def test_uploads_are_bounded_in_all_by_what_was_announced():
    uploads = Uploads(MemoryBudget(25))
    uploads.take("a", "1", part())
    uploads.take("b", "2", part())
    with pytest.raises(Unavailable):
        uploads.take("c", "3", part())
    with pytest.raises(TooLarge):
        uploads.take("c", "3", part(length=26))
    with pytest.raises(ConflictingReport):
        uploads.take("a", "1", part(sha256=bytes(31) + b"\1"))
    uploads.drop_for(["1", "9"])
    uploads.take("c", "3", part())
    assert uploads.assignments == ["2", "3"]


def test_a_device_keeps_the_parts_of_one_report_only():
    room = MemoryBudget(25)
    uploads = Uploads(room)
    first = uploads.take("a", "1", part())
    second = uploads.take("a", "2", part())
    assert (uploads.assignments, room.taken, len(first.data)) == (["2"], 10, 0)
    uploads.drop(first)
    assert uploads.take("a", "2", part()) is second
    uploads.drop_of("a")
    assert (uploads.assignments, room.taken) == ([], 0)


def test_memory_of_an_upload_is_freed_while_a_request_holds_it():
    uploads = Uploads(MemoryBudget(100))
    upload = uploads.take("a", "1", part())
    upload.append(b"abc")
    uploads.drop(upload)
    assert len(upload.data) == 0
    with pytest.raises(NoLongerNeeded):
        upload.append(b"d")
