"""Bodies that are received in place: however they arrive, and whatever follows them on their connection."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import contextmanager

import numpy as np
import pytest
import safetensors.numpy

from benchmarks.load import null_bundle
from coordinator.api.devices.reports import ReportApi
from coordinator.api.limits import MemoryBudget
from coordinator.errors import Unavailable
from coordinator.store.records.records import Records
from fedcore import checkpoint
from fedcore.wire import messages
from fedcore.wire.messages import Receipt
from fedcore.wire.signatures import content_digest
from ingress import limits
from ingress.connection import Body, HeadBufferingTransport
from tests.coordinator.conftest import committed
from tests.coordinator.test_api import assign, put, refused

SIZE = 50_000
"""Values of a report that comes in more than one piece, whatever the size of a piece."""


@pytest.fixture
def register_large(register, tmp_path):
    def make(**settings):
        return register(null_bundle(tmp_path / "large", SIZE), **settings)

    return make


def report(number):
    """A body whose values are all `number`; its weight is 1."""
    values = np.full(SIZE + 3, number, np.float32)
    values[SIZE] = 1
    return checkpoint.encode({"report": values})


def head(client, assignment, body, *changes):
    """The first lines of a signed PUT of a report, up to its body."""
    request = client.build_request("PUT", f"/v1/assignments/{assignment}/report", content=body)
    request.headers["Content-Digest"] = content_digest(body)
    client.devices.owner(assignment).sign(request)
    dropped = {name.partition(":")[0].lower() for name in changes}
    kept = [f"{name}: {value}" for name, value in request.headers.items() if name not in dropped]
    lines = [f"PUT {request.url.raw_path.decode()} HTTP/1.1", *kept, *(one for one in changes if one[-1] != ":")]
    return "\r\n".join([*lines, "", ""]).encode()


@contextmanager
def connected(client):
    """A connection, and its other end's answers as they come: each the receipt of a report."""
    with (
        socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as connection,
        connection.makefile("rb") as answers,
    ):
        yield connection, receipts(answers)


def receipts(answers):
    while status := answers.readline():
        assert b" 200 " in status
        fields = dict(line.split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
        yield messages.decode(answers.read(int(fields[b"content-length"])), Receipt).assignment


def test_reports_that_follow_each_other_on_one_connection_are_all_counted(store, register_large, client):
    task = register_large(goal=3, rounds=1)
    given = [one.assignment for one in assign(client, "a", "b", "c")]
    bodies = [report(number) for number in (1, 2, 3)]
    first, *others = (head(client, one, body) + body for one, body in zip(given, bodies, strict=True))
    with connected(client) as (connection, answers):
        connection.sendall(first)
        assert next(answers) == given[0]
        connection.sendall(b"".join(others))
        assert [next(answers), next(answers)] == given[1:]
    np.testing.assert_array_equal(committed(store, task, 1), np.full(SIZE, 2, np.float32))


@pytest.mark.parametrize("piece", [1 << 12, 100_000])
def test_a_body_in_pieces_that_pause_is_the_body(store, register_large, client, piece):
    task = register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")
    body = report(2)
    with connected(client) as (connection, answers):
        connection.sendall(head(client, given.assignment, body))
        for begin in range(0, len(body), piece):
            connection.sendall(body[begin : begin + piece])
            time.sleep(0.002)
        assert next(answers) == given.assignment
    np.testing.assert_array_equal(committed(store, task, 1), np.full(SIZE, 2, np.float32))


def test_a_body_that_keeps_coming_for_long_leaves_its_connection_open(register_large, client, monkeypatch):
    monkeypatch.setattr(limits, "WINDOW_S", 0.3)
    monkeypatch.setattr(limits, "LOOK_S", 0.05)
    register_large(goal=2, rounds=1)
    given = [one.assignment for one in assign(client, "a", "b")]
    body = report(2)
    with connected(client) as (connection, answers):
        connection.sendall(head(client, given[0], body))
        for begin in range(0, len(body), len(body) // 10 + 1):
            connection.sendall(body[begin : begin + len(body) // 10 + 1])
            time.sleep(0.12)
        assert next(answers) == given[0]
        connection.sendall(head(client, given[1], body) + body)
        assert next(answers) == given[1]


def test_a_body_in_chunked_coding_is_the_body(store, register_large, client):
    task = register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")
    body = report(2)
    with connected(client) as (connection, answers):
        connection.sendall(head(client, given.assignment, body, "Content-Length:", "Transfer-Encoding: chunked"))
        for begin in range(0, len(body), 70_000):
            part = body[begin : begin + 70_000]
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        connection.sendall(b"0\r\n\r\n")
        assert next(answers) == given.assignment
    np.testing.assert_array_equal(committed(store, task, 1), np.full(SIZE, 2, np.float32))


def test_whoever_waits_to_be_told_to_send_a_body_is_told(register_large, client):
    register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")
    body = report(2)
    with connected(client) as (connection, answers):
        connection.sendall(head(client, given.assignment, body, "Expect: 100-continue"))
        assert connection.recv(1 << 12) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert next(answers) == given.assignment


def test_body_other_than_the_signed_one_counts_nothing(register_large, client):
    register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")
    body = report(2)
    broken = bytearray(body)
    broken[-1] ^= 1
    refused(put(client, given.assignment, bytes(broken), content_digest(body)), "digest-mismatch")
    assert put(client, given.assignment, body).status_code == 200


def test_whose_an_assignment_is_needs_no_look_up_when_its_report_comes(register_large, client, monkeypatch):
    register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")
    look_up, looked_up = Records.assignment, []

    def watched(records, assignment):
        looked_up.append(assignment)
        return look_up(records, assignment)

    monkeypatch.setattr(Records, "assignment", watched)
    assert put(client, given.assignment, report(2)).status_code == 200
    assert looked_up == []


def test_what_fails_in_a_route_is_a_problem_document_and_is_logged(register_large, client, monkeypatch, caplog):
    register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")

    async def broken(*_, **__):
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(ReportApi, "_count", broken)
    with caplog.at_level(logging.ERROR):
        refused(put(client, given.assignment, report(2)), "internal")
        until = time.monotonic() + 30
        while "ZeroDivisionError: of the test" not in caplog.text:  # the answer is sent first
            assert time.monotonic() < until
            time.sleep(0.01)
    assert given.assignment not in caplog.text


def test_a_body_does_not_grow_beyond_its_memory():
    body = Body(memoryview(bytearray(5)))
    assert body.append(b"abc")
    assert not body.append(b"def")
    assert (bytes(body.data), bytes(body.free_space)) == (b"abc", bytes(2))


def fail_with(memory):
    memory[:] = b"z" * len(memory)
    raise BufferError


def test_memory_is_reused_for_reports_of_its_size_unless_one_failed():
    room = MemoryBudget(1000)
    with room.hold(20) as first:
        first[:] = b"x" * 20
    with room.hold(20) as again, room.hold(20) as another:
        assert bytes(again) == b"x" * 20
        another[:] = b"y" * 20
    with room.hold(30):
        pass  # whatever was kept had another size
    with pytest.raises(BufferError), room.hold(30) as memory:
        fail_with(memory)
    with room.hold(30) as third:
        assert bytes(third) != b"z" * 30
    assert room.taken == 0


def test_memory_that_is_kept_leaves_the_bound_as_it_is():
    room = MemoryBudget(100)
    with room.hold(12):
        pass
    assert sum(map(len, room._spare)) == 12
    room.take(90)
    assert room._spare == []
    with pytest.raises(Unavailable):
        room.take(11)


def test_an_eighth_of_the_room_is_kept_at_most():
    room = MemoryBudget(100)
    with room.hold(6), room.hold(6), room.hold(6):
        pass
    assert len(room._spare) == 2


@pytest.mark.parametrize("at", [0, 1, SIZE // 2, SIZE - 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(register_large, client, at, value):
    register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")
    values = np.frombuffer(report(2), np.float32, SIZE + 3, len(report(2)) - 4 * (SIZE + 3)).copy()
    values[at] = value
    refused(put(client, given.assignment, checkpoint.encode({"report": values})), "invalid-report")


@pytest.mark.parametrize("at", [0, SIZE - 1])
def test_a_value_that_is_not_finite_is_found_in_chunked_coding(register_large, client, at):
    register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")
    values = np.frombuffer(report(2), np.float32, SIZE + 3, len(report(2)) - 4 * (SIZE + 3)).copy()
    values[at] = np.nan
    body = checkpoint.encode({"report": values})
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as connection:
        connection.sendall(head(client, given.assignment, body, "Content-Length:", "Transfer-Encoding: chunked"))
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 422 ")


@pytest.mark.parametrize("value", [2.0, np.nan])
def test_values_are_looked_at_in_whatever_form_a_report_comes(register_large, client, value):
    register_large(goal=1, rounds=1)
    (given,) = assign(client, "a")
    values = np.full(SIZE + 3, 2, np.float32)
    values[SIZE], values[7] = 1, value
    body = safetensors.numpy.save({"report": values}, metadata={"made": "otherwise" * 99})
    answer = put(client, given.assignment, body)
    assert answer.status_code == (200 if np.isfinite(value) else 422), answer.text


class Wire:
    """A transport that keeps what is written."""

    def __init__(self):
        self.sent = []

    def write(self, data):
        self.sent.append(data)

    def close(self):
        self.sent.append(None)


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", b"ab", b"cd"], [1, 2]),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n"], [0, 1]),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n", b"HTTP/1.1 100 x"], [1]),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n", b"a"], [0, 2]),
    ],
)
def test_an_answers_head_waits_for_its_body_and_for_nothing_else(written, sent):
    wire = Wire()
    answer = HeadBufferingTransport(wire)
    for number, data in enumerate(written):
        answer.write(data)
        assert b"".join(wire.sent) == b"".join(written)[: len(b"".join(wire.sent))]
        if number in sent:
            assert b"".join(wire.sent) == b"".join(written[: number + 1])
    assert len(wire.sent) == len(sent)


def test_a_head_without_a_body_is_sent_before_the_end():
    wire = Wire()
    answer = HeadBufferingTransport(wire)
    answer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
    answer.close()
    assert wire.sent == [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", None]
