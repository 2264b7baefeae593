"""Requests that one replica passes on to another: nothing of them changes, and nobody is waited for in vain."""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2
import numpy as np
import pytest
import uvicorn

from coordinator.api.masked_exchange import SHARES, ReplicaChannel
from coordinator.driver.replica_membership import Directory
from coordinator.keys import Keys
from coordinator.rules.pacing import Notice, text_of
from coordinator.rules.replicas import Replica
from coordinator.rules.selection import Needs
from coordinator.rules.states import AssignmentState
from coordinator.settings import Settings
from fedcore import checkpoint
from fedcore.wire import messages
from fedcore.wire.messages import CheckIn
from tests.coordinator.bundles import make_bundle, make_plan, report_vector
from tests.coordinator.devices import CAPABILITIES, speaking_to
from tests.coordinator.replicas import until
from tests.coordinator.test_api import ask, assign, check_in, put, refused
from tests.servers import serving

HELLO = messages.encode(CheckIn(capabilities=CAPABILITIES, examples={"default": 10}))


@pytest.fixture
def start(store, database, tmp_path):
    """Start a coordinator on the store, on a thread."""

    def make(**settings):
        given = {"database": database, "keys": tmp_path / "keys", "blobs": tmp_path / "blobs", "lease_s": 600}
        given |= {"port": 0, "admin_port": 0, "retry_min_s": 1, "retry_max_s": 2, "max_wait_s": 60}
        return serving(Settings(**given | settings))

    return make


@pytest.fixture
def pair(start):
    """Clients of two replicas; the first one alone drives populations."""
    with (
        start() as first,
        start(role="api") as second,
        speaking_to(first) as holder,
        speaking_to(second, devices=holder.devices) as other,
    ):
        yield holder, other


def leases(store):
    with store.database.reading() as records:
        return records.leases.leases()


class Echo:
    """A replica that notes what it is asked, and has one answer."""

    def __init__(self):
        self.asked = []

    async def __call__(self, scope, receive, send):
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        target = scope["raw_path"] + b"?" + scope["query_string"]
        self.asked.append((scope["method"], target, dict(scope["headers"]), body))
        headers = [(b"content-type", b"text/x"), (b"x-one", b"1"), (b"x-one", b"2"), (b"retry-after", b"7")]
        await send({"type": "http.response.start", "status": 418, "headers": headers})
        await send({"type": "http.response.body", "body": b"answer"})


@contextmanager
def peer(store, app):
    """A process among the replicas that is `app`; called 00000000."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", server_header=False))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        with store.database.writing() as records:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            records.leases.announce(Replica("00000000", url, beat=0, draining=False))
        until(lambda: server.started)
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()


def test_request_and_answer_are_passed_on_as_they_are(store, register, pair):
    _, other = pair
    echo = Echo()
    with peer(store, echo):
        headers = {"Host": "devices.example", "Signature": "sig1=:AA==:", "Prefer": "wait=3", "Connection": "close"}
        pieces = iter([b"one ", b"two ", b"x" * 300_000])
        target = "/v1/assignments/00000000.a%2Fb~/report?x=%20y"
        answer = other.put(target, content=pieces, headers=headers)
    ((method, asked, arrived, body),) = echo.asked
    assert (method, asked.decode(), body) == ("PUT", target, b"one two " + b"x" * 300_000)
    assert {name: arrived[name.lower().encode()].decode() for name in headers if name != "Connection"} == {
        name: value for name, value in headers.items() if name != "Connection"
    }
    assert (answer.status_code, answer.content) == (418, b"answer")
    assert answer.headers.get_list("x-one") == ["1", "2"]
    assert (answer.headers["content-type"], answer.headers["retry-after"]) == ("text/x", "7")
    assert len(answer.headers.get_list("date")) == 1


@pytest.mark.security("a copy of the database … can sign no invitation")
def test_forwarding_proof_holds_for_one_request_and_one_receiver(store, pair):
    _, other = pair
    echo = Echo()
    with peer(store, echo):
        assert other.post("/v1/sessions/00000000.a/assignments").status_code == 418
        proof = {"Muster-Forwarded": echo.asked.pop()[2][b"muster-forwarded"].decode()}
        for path in ("/v1/sessions/00000000.a/assignments", "/v1/sessions/00000000.b/assignments"):
            refused(other.post(path, headers=proof), "unavailable")
    assert echo.asked == []


@pytest.mark.security("A process takes a request once")
def test_a_request_that_was_overheard_is_refused_at_another_replica_too(register, pair):
    holder, other = pair
    register()
    assert until(lambda: check_in(other, "b").status_code == 200)
    first = holder.post("/v1/populations/phones/checkins", content=HELLO, auth=holder.devices["a"])
    assert first.status_code == 200
    for at in (holder, other):
        again = at.post("/v1/populations/phones/checkins", content=HELLO, headers=first.request.headers)
        refused(again, "replayed-signature")


def test_what_was_passed_on_once_is_not_passed_on_again(store, register, pair, tmp_path):
    holder, _ = pair
    register()
    echo = Echo()
    path = "/v1/populations/phones/checkins"
    (holding,) = until(lambda: [lease for lease in leases(store) if lease.holder])
    with peer(store, echo):
        with store.database.writing() as records:
            records.leases.release(holding)
            assert records.leases.take(holding, "00000000")
        until(lambda: check_in(holder).status_code == 418)
        secret = Keys.load(tmp_path / "keys").between_replicas
        proof = hmac.digest(secret, f"POST {path} {holding.holder}".encode(), "sha256").hex()
        asked = len(echo.asked)
        passed_on = {"Muster-Forwarded": proof}
        refused(holder.post(path, content=HELLO, headers=passed_on, auth=holder.devices["a"]), "unavailable")
        assert len(echo.asked) == asked


def test_replica_answers_whom_no_task_can_use_and_passes_on_the_rest(store, register, pair):
    _, other = pair
    register()
    echo = Echo()
    (holding,) = until(lambda: [lease for lease in leases(store) if lease.holder])
    able = Needs(frozenset({"onnx"}), "default", 10)
    notice = Notice(generation=b"a name..", tasks={"task": able}, idle_until=0.0)
    path, useless = "/v1/populations/phones/checkins", CheckIn(capabilities=CAPABILITIES, examples={"default": 1})

    def ask_in_vain():
        return other.post(path, content=messages.encode(useless), auth=other.devices["a"])

    with peer(store, echo):
        with store.database.writing() as records:
            records.leases.release(holding)
            assert records.leases.take(holding, "00000000")
            records.notices.publish("phones", "00000000", text_of(notice))
        until(lambda: ask_in_vain().status_code == 418)
        with store.database.writing() as records:
            records.leases.beat(Replica("00000000", "", beat=1, draining=False, steady=1e6))
        until(lambda: ask_in_vain().status_code == 200)
        echo.asked.clear()
        assert ask_in_vain().json()["reason"] == "too-early"
        assert echo.asked == []
        assert other.post(path, content=HELLO, auth=other.devices["b"]).status_code == 418
    ((method, target, headers, body),) = echo.asked
    assert (method, target.decode(), body) == ("POST", f"{path}?", HELLO)
    assert headers[b"signature"]


def test_wait_ends_when_the_device_hangs_up_behind_another_replica(register, pair):
    holder, other = pair
    register(goal=2, selection_timeout_s=60)
    until(lambda: check_in(other).status_code == 200)
    session = check_in(other).json()["session"]
    with pytest.raises(httpx2.ReadTimeout):
        ask(other, session, headers={"Prefer": "wait=60"}, timeout=0.5)
    # While somebody waits in a session, nobody else can.
    assert until(lambda: (answer := ask(holder, session)).status_code == 200 and answer).json()["reason"]


def test_device_that_hangs_up_behind_another_replica_is_lost(store, register, pair):
    holder, other = pair
    task = register(goal=1, rounds=1)
    until(lambda: check_in(other).status_code == 200)
    (given,) = assign(other, "a")
    path, how = f"/v1/assignments/{given.assignment}", {"auth": other.devices["a"]}
    assert other.get(path, **how).status_code == 204
    with pytest.raises(httpx2.ReadTimeout):
        other.get(path, headers={"Prefer": "wait=60"}, timeout=0.5, **how)
    until(lambda: store.cohort(task, 1)[0].state is AssignmentState.LOST, 30)
    refused(holder.get(path, **how), "no-longer-needed")


def test_long_report_and_its_receipt_pass_through_another_replica(store, register, pair, tmp_path):
    holder, other = pair
    plan = make_plan(300_000)
    start = np.zeros(300_000, np.float32)
    task = register(make_bundle(tmp_path / "large", plan=plan, start=start), goal=1, rounds=1)
    until(lambda: check_in(other).status_code == 200)
    (assignment,) = assign(other, "a")
    body = checkpoint.encode({"report": report_vector(start + 1, 1, plan=plan)})
    assert len(body) > 1_000_000
    receipt = put(other, assignment.assignment, body)
    assert receipt.status_code == 200
    until(lambda: store.rounds(task)[0].checkpoint_sha256)
    assert put(holder, assignment.assignment, body).content == receipt.content
    assert put(other, assignment.assignment, body).content == receipt.content
    assert [one.reported for one in store.rounds(task)] == [1]


def test_answer_of_a_replica_that_is_gone_is_not_waited_for():
    async def tell(membership):
        channel = ReplicaChannel(SimpleNamespace(membership=membership, keys=SimpleNamespace(between_replicas=b"key")))
        telling = asyncio.create_task(channel.post("silent", SHARES, b"reports"))
        await asyncio.sleep(0.2)
        assert not telling.done()
        membership.directory = Directory()
        try:
            async with asyncio.timeout(10):
                return await telling
        finally:
            await channel.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = {"silent": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        assert asyncio.run(tell(SimpleNamespace(directory=Directory(urls), lease_s=1.0))) is None
