"""A device's connections, against a server that answers with bytes as a test wants them."""

import socket
import threading
from contextlib import closing

import numpy as np
import pytest

from device_runtime.errors import ConfigError
from device_runtime.protocol import connection
from device_runtime.protocol.connection import ConnectionFailed, Connections, HttpRequest, address_of
from device_runtime.session import DeviceConfig, run_session
from simulator import datasets
from tests.coordinator.test_operations import self_made_certificate
from tests.device_runtime.process import World, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers every request with the next of `answers`, on as many connections as come. Counts both."""

    def __init__(self, *answers):
        self.answers, self.connections, self.requests = list(answers), 0, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = address_of(f"http://127.0.0.1:{self._listener.getsockname()[1]}")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock):
        with sock:
            while request := sock.recv(1 << 16):
                self.requests.append(request)
                pieces = self.answers.pop(0)
                try:
                    for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                        sock.sendall(piece)
                except OSError:
                    return

    def close(self):
        self._listener.close()


@pytest.fixture
def serve():
    made = []

    def make(*answers):
        server = Server(*answers)
        made.append((server, Connections(server.address)))
        return made[-1]

    yield make
    for server, connections in made:
        connections.close()
        server.close()


def ask(connections, method="GET", body=b"", timeout_s=5.0):
    request = HttpRequest(method, "/x", {"host": "h", "content-length": str(len(body))}, [body], timeout_s)
    with closing(connections.send(request)) as response:
        return response.status, b"".join(response)


def endless(head, piece):
    yield head
    while True:
        yield piece


def test_a_connection_is_kept_and_a_request_is_one_write(serve):
    server, connections = serve(OK, OK)
    assert [ask(connections, "POST", b"body"), ask(connections)] == [(200, b"ok")] * 2
    assert server.connections == 1
    assert server.requests[0].endswith(b"\r\n\r\nbody")


def test_interim_answers_are_passed_over(serve):
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    server, connections = serve(early + b"HTTP/1.1 100 Continue\r\n\r\n" + OK, OK)
    assert [ask(connections), ask(connections)] == [(200, b"ok")] * 2
    assert server.connections == 1


def test_an_answer_without_a_body_is_not_waited_for(serve):
    _, connections = serve(b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", OK)
    assert ask(connections) == (204, b"")


def test_a_body_cut_short_fails(serve):
    _, connections = serve([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nok"])
    with pytest.raises(ConnectionFailed):
        ask(connections, timeout_s=0.5)


@pytest.mark.parametrize(
    "answer",
    [
        endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 1000),
        endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 60000 + b"\r\ny\r\n"),
    ],
    ids=["interim answers", "trailers", "lengths of chunks"],
)
def test_an_answer_without_end_beside_its_body_is_given_up(serve, answer):
    _, connections = serve(answer)
    with pytest.raises(ConnectionFailed, match="mostly not its body"):
        ask(connections)


def test_a_connection_that_idled_is_not_used_again(serve, monkeypatch):
    server, connections = serve(OK, OK)
    ask(connections)
    monkeypatch.setattr(connection, "IDLE_S", 0.0)
    ask(connections)
    assert server.connections == 2


def test_closing_ends_a_wait_in_another_thread(serve):
    server, connections = serve([])
    failed = []

    def wait():
        try:
            ask(connections, timeout_s=60.0)
        except ConnectionFailed as error:
            failed.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    until(lambda: server.requests)
    connections.close()
    waiting.join(30)
    assert len(failed) == 1


@pytest.mark.parametrize("url", ["http://h/a b", "http://h/?q=1", "http://h/#f", "http://h:0", "http://a b"])
def test_an_address_with_more_than_host_port_and_path_is_refused(url):
    with pytest.raises(ConfigError):
        address_of(url)


def test_an_address_says_what_a_request_names():
    assert address_of("https://Example.org:443/base/").authority == "example.org"
    assert address_of("http://[::1]:8080").authority == "[::1]:8080"
    assert address_of("https://example.org/base/").path == "/base"


class Direct:
    """A road without a proxy."""

    def __init__(self, url):
        self.url = url


def test_a_private_authority_is_trusted_once_it_is_named(coordinators, tmp_path, plans, monkeypatch):
    np.savez(tmp_path / "mine.npz", **datasets.load("digits").shard(0))
    certificate, key = self_made_certificate(tmp_path)
    with coordinators.local(tmp_path, tls_cert=str(certificate), tls_key=str(key)) as local:
        where = ["--db", local.database, "--blobs", local.blobs]
        World(tmp_path, plans, Direct(local.url), where).create()
        config = DeviceConfig(
            coordinator=local.url, population="p", examples=tmp_path / "mine.npz", state=tmp_path / "state", wait_s=5.0
        )
        assert local.url.startswith("https://")
        stranger = run_session(config)
        assert stranger.outcome == "failed"
        assert "certificate" in stranger.detail
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert run_session(config).outcome == "reported"
