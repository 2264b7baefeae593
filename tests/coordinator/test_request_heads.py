"""Requests that break HTTP's rules: each is answered with its status, then the connection is closed."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import uvicorn

from ingress import connection
from ingress.limits import ConnectionLimits
from ingress.server import HttpConfig, listening
from tests.coordinator.connections import rest_of
from tests.coordinator.test_operations import self_made_certificate

HOST = b"Host: x\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST
POST = b"POST / HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


async def echo(scope, receive, send):
    """Answer with what was asked for: the host, the path, the query and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    said = b" ".join([dict(scope["headers"]).get(b"host", b"-"), scope["raw_path"], scope["query_string"], body])
    length = [(b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": said})


@contextmanager
def serving_echo(certificate=None, key=None):
    """A port, for as long as the block runs."""
    limits = ConnectionLimits(100, 0)
    config = HttpConfig(tls_cert=certificate, tls_key=key, drain_s=1).uvicorn(echo, limits)
    config.lifespan = "off"
    with listening("127.0.0.1", 0, limits) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def port():
    with serving_echo() as opened:
        yield opened


def sent(port, *pieces, wrap=lambda connection: connection):
    """The statuses and the bytes of all that is answered to these pieces, until the other end has closed."""
    with wrap(socket.create_connection(("127.0.0.1", port), timeout=10)) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = rest_of(connection)
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)], answer


REFUSED = {
    "no host": (400, b"GET / HTTP/1.1\r\n\r\n"),
    "two hosts": (400, GET + HOST + b"\r\n"),
    "two hosts, HTTP/1.0": (400, b"GET / HTTP/1.0\r\n" + HOST + HOST + b"\r\n"),
    "an empty host": (400, b"GET / HTTP/1.1\r\nHost:\r\n\r\n"),
    "a host with a blank": (400, b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n"),
    "a host with a path": (400, b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    "an unknown coding": (501, POST + b"Transfer-Encoding: foo\r\n\r\nabc"),
    "a coding under chunked": (501, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "a coding on a line of its own": (501, POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "a coding over chunked": (400, POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
    "chunked twice": (400, POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"),
    "identity": (501, POST + b"Transfer-Encoding: identity\r\n\r\n"),
    "a coding of HTTP/1.0": (400, b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "a length and a coding": (400, POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "two lengths": (400, POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
    "a list of lengths": (400, POST + b"Content-Length: 3, 3\r\n\r\nabc"),
    "a signed length": (400, POST + b"Content-Length: +3\r\n\r\nabc"),
    "a length beyond 64 bits": (400, POST + b"Content-Length: 99999999999999999999\r\n\r\n"),
    "a length that is no number": (400, POST + b"Content-Length: 0x3\r\n\r\nabc"),
    "a chunk that is no number": (400, CHUNKED + b"xyz\r\n"),
    "a chunk beyond 64 bits": (400, CHUNKED + b"fffffffffffffffff\r\n"),
    "a chunk longer than it says": (400, CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n"),
    "a chunk that ends with a bare LF": (400, CHUNKED + b"3\nabc\n0\n\n"),
    "a trailer without a colon": (400, CHUNKED + b"0\r\nx y\r\n\r\n"),
    "trailers without end": (431, CHUNKED + b"0\r\n" + b"X: y\r\n" * 5000),
    "a folded field": (400, GET + b"X: a\r\n b\r\n\r\n"),
    "a blank before the fields": (400, b"GET / HTTP/1.1\r\n Host: x\r\n\r\n"),
    "a blank before a colon": (400, b"GET / HTTP/1.1\r\nHost : x\r\n\r\n"),
    "a field without a colon": (400, GET + b"X\r\n\r\n"),
    "a field without a name": (400, GET + b": x\r\n\r\n"),
    "a field whose name is none": (400, GET + b"X(: x\r\n\r\n"),
    "NUL in a field": (400, GET + b"X: a\0b\r\n\r\n"),
    "a bare CR in a field": (400, GET + b"X: a\rb\r\n\r\n"),
    "a bare LF after the first line": (400, b"GET / HTTP/1.1\nHost: x\r\n\r\n"),
    "a bare LF after a field": (400, b"GET / HTTP/1.1\r\nHost: x\n\r\n"),
    "a bare LF at the end": (400, GET + b"\n"),
    "a long target": (414, b"GET /" + b"x" * 2 * connection.HEAD_BYTES),
    "a long field": (431, GET + b"X: " + b"x" * 2 * connection.HEAD_BYTES),
    "many fields": (431, GET + b"X: x\r\n" * connection.HEAD_FIELDS + b"\r\n"),
    "a target with a fragment": (400, b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a target that is no path": (400, b"GET a HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a control character in a target": (400, b"GET /\x01 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a URL of another scheme": (400, b"GET ftp://x/ HTTP/1.1\r\n" + HOST + b"\r\n"),
    "a URL with a user": (400, b"GET http://u@x/ HTTP/1.1\r\n" + HOST + b"\r\n"),
    "an asterisk": (400, b"GET * HTTP/1.1\r\n" + HOST + b"\r\n"),
    "CONNECT": (501, b"CONNECT x:80 HTTP/1.1\r\n" + HOST + b"\r\n"),
    "an unknown method": (501, b"FOO / HTTP/1.1\r\n" + HOST + b"\r\n"),
    "HTTP/0.9": (505, b"GET /\r\n\r\n"),
    "HTTP/2.0": (505, b"GET / HTTP/2.0\r\n" + HOST + b"\r\n"),
    "the preface of HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/1.2": (505, b"GET / HTTP/1.2\r\n" + HOST + b"\r\n"),
    "a version in small letters": (400, b"GET / http/1.1\r\n" + HOST + b"\r\n"),
    "an unknown expectation": (417, POST + b"Expect: foo\r\nContent-Length: 3\r\n\r\nabc"),
    "an upgrade with a body": (501, POST + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc"),
}


def test_a_plain_port_says_that_it_is_spoken_to_in_tls(port):
    statuses, answer = sent(port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
    assert statuses == [400]
    assert b"this is TLS, and the port speaks plain HTTP" in answer


@pytest.mark.parametrize(("status", "request_bytes"), REFUSED.values(), ids=REFUSED)
def test_a_broken_request_is_answered_after_those_before_it(port, status, request_bytes):
    assert sent(port, request_bytes)[0] == [status]
    assert sent(port, GET + b"\r\n" + request_bytes)[0] == [200, status]
    assert sent(port, GET + b"\r\n", request_bytes + GET + b"\r\n")[0] == [200, status]


def test_a_large_request_is_answered_though_its_sender_goes_on(port):
    assert sent(port, *[b"GET /" + b"x" * 60_000] * 50)[0] == [414]


def test_of_many_requests_at_once_some_are_answered_the_next_refused(port):
    statuses, answer = sent(port, (GET + b"\r\n") * 40)
    assert statuses == [200] * 17 + [429]
    assert b"connection: close" in answer.rpartition(b"HTTP/1.1 429")[2]


def test_a_broken_request_over_tls_is_answered_after_those_before_it(tmp_path):
    certificate, key = self_made_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate)
    wrap = partial(trust.wrap_socket, server_hostname="127.0.0.1")
    with serving_echo(certificate, key) as port:
        assert sent(port, GET + b"\r\n" + CHUNKED + b"xyz\r\n", wrap=wrap)[0] == [200, 400]


GOOD = {
    "an IPv6 address": (b"GET /a?b HTTP/1.1\r\nHost: [::1]:80\r\n", b"[::1]:80 /a b "),
    "a URL": (b"GET http://y:8/a?b HTTP/1.1\r\n" + HOST, b"y:8 /a b "),
    "a URL without a path": (b"GET http://y?b HTTP/1.1\r\n" + HOST, b"y / b "),
    "HTTP/1.0 without a host": (b"GET / HTTP/1.0\r\n", b"- /  "),
    "empty lines before it": (b"\r\n\r\n" + GET, b"x /  "),
    "an upgrade that is declined": (GET + b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"x /  "),
}


@pytest.mark.parametrize(("head", "body"), GOOD.values(), ids=GOOD)
def test_a_good_request_is_answered_and_so_is_the_one_after_it(port, head, body):
    last = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    statuses, answer = sent(port, head + b"\r\n" + last)
    assert statuses == ([200] if b"HTTP/1.0" in head else [200, 200])
    assert body in answer


def test_a_coding_may_be_named_in_any_case(port):
    coded = POST + b"Connection: close\r\nTransfer-Encoding: Chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n"
    assert sent(port, coded)[1].endswith(b"x /  abc")


def test_a_continuation_is_sent_to_http_1_1_only(port):
    expects = b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"
    assert sent(port, POST + expects)[0] == [100, 200]
    assert sent(port, b"POST / HTTP/1.0\r\n" + expects)[0] == [200]
