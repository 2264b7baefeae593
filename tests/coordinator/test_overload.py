"""What comes faster than it is answered, and how soon answers go out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter

import pytest
import uvicorn

from coordinator.api.http import RequestMiddleware
from coordinator.api.limits import CheckInShedder, Limits
from coordinator.monitoring import Metrics
from coordinator.settings import Settings
from fedcore.wire.messages import RetryWindow
from ingress.limits import ConnectionLimits
from ingress.server import HttpConfig, listening
from tests.coordinator.connections import status_of

CHECK_IN, REPORT = "/v1/populations/p/checkins", "/v1/assignments/a/report"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_turn_of_the_loop_answers_check_ins_for_a_bounded_time():
    clock = Clock()
    shedder = CheckInShedder(clock)

    async def turns():
        late = []
        for clock.now in (0.0, 0.2, 0.3):
            late.append(shedder.must_shed())
        await asyncio.sleep(0)
        for clock.now in (0.4, 0.6):
            late.append(shedder.must_shed())
        return late

    assert asyncio.run(turns()) == [False, False, True, False, False]


@pytest.mark.promise("Overload is shed, with the time to come back")
def test_only_check_ins_are_shed_by_503_with_a_time_to_return():
    clock, metrics, limits = Clock(), Metrics(), Limits(Settings())
    limits.shedder = CheckInShedder(clock)

    async def answered(scope, receive, send):
        clock.now += 0.15
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    middleware = RequestMiddleware(answered, metrics, RetryWindow(3.0, 9.0), limits)

    async def ask(path):
        said = []

        async def send(message):
            said.append(message)

        await middleware({"type": "http", "method": "POST", "path": path, "headers": []}, None, send)
        return said

    async def one_turn():
        return [await ask(path) for path in (CHECK_IN, CHECK_IN, CHECK_IN, REPORT)]

    first, second, third, report = asyncio.run(one_turn())
    assert [answer[0]["status"] for answer in (first, second, third, report)] == [204, 204, 503, 204]
    assert (b"retry-after", b"3") in third[0]["headers"]
    assert json.loads(third[1]["body"])["type"].endswith("unavailable")
    assert 'muster_shed_requests_total{limit="check-ins"} 1.0' in metrics.text().decode()


def test_check_ins_that_come_on_new_connections_are_shed():
    async def answered(scope, receive, send):
        time.sleep(0.005)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    limits = ConnectionLimits(800, 0)
    app = RequestMiddleware(answered, Metrics(), RetryWindow(3.0, 9.0), Limits(Settings()))
    server = uvicorn.Server(HttpConfig(tls_cert=None, tls_key=None, drain_s=1).uvicorn(app, limits))
    with contextlib.ExitStack() as connections:
        listener = connections.enter_context(listening("127.0.0.1", 0, limits))
        waiting = [connections.enter_context(socket.create_connection(listener.getsockname())) for _ in range(100)]
        for connection in waiting:
            connection.sendall(f"POST {CHECK_IN} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            statuses = Counter(status_of(connection) for connection in waiting)
        finally:
            server.should_exit = True
            thread.join()
    assert statuses[204] + statuses[503] == 100
    assert statuses[204] >= 10
    assert statuses[503] >= 10


def test_an_answer_does_not_wait_for_an_acknowledgement():
    async def connected():
        limits = ConnectionLimits(1, 1)
        with listening("127.0.0.1", 0, limits) as listener, socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(connected())
