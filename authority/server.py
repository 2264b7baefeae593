"""The authority as a process: its key's file, its port, and its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from authority.attestation import Attestation
from authority.beacons import Beacons
from authority.errors import KeyMissing, PortTaken
from authority.issuer import Issuer
from authority.service import authority_app
from fedcore.signing import key_text, public_key
from fedcore.succession import SucceedingKey

DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityConfig:
    """How an authority runs. key: the file of its private key. credential_days: for how long a credential is good.

    server_keys: the public keys, as text, of the coordinators for which it draws beacons.
    """

    key: Path
    host: str = "127.0.0.1"
    port: int = 8082
    accept_unattested: bool = False
    enrolment_secret_file: Path | None = None
    android_file: Path | None = None
    credential_days: float = 30.0
    server_keys: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def issuer(self) -> Issuer:
        """What issues credentials. Raises KeyMissing, InvalidKey, BadSecret or BadAndroidFile."""
        if not self.key.exists():
            raise KeyMissing(
                f"there is no key at {self.key}: `muster authority new-key {self.key}` makes one, and if there was "
                "one, put it back, since devices trust no other"
            )
        attestation = Attestation.of(self.accept_unattested, self.enrolment_secret_file, self.android_file)
        return Issuer(SucceedingKey.load("authority", self.key), attestation, int(self.credential_days * DAY_S))


def serve(config: AuthorityConfig, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM or SIGINT. on_ready: called with the URL once requests are answered.

    Raises PortTaken, and as `AuthorityConfig.issuer`.
    """
    _Server(config, on_ready).listen()


@contextmanager
def serving(config: AuthorityConfig) -> Iterator[str]:
    """Serve from a thread of this process, for as long as the block runs; gives the URL."""
    found: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    server = _Server(config, on_ready)
    thread = threading.Thread(target=server.listen, name="authority")
    thread.start()
    try:
        while not ready.wait(0.01):
            if not thread.is_alive():
                raise RuntimeError("the authority did not start; its log says why")
        yield found[0]
    finally:
        server.should_exit = True
        thread.join()


def _app(config: AuthorityConfig) -> Starlette:
    issuer = config.issuer()
    servers = {key_text(public_key(text).public_bytes_raw()) for text in config.server_keys}
    return authority_app(issuer, Beacons(issuer.key.private, servers))


class _Server(uvicorn.Server):
    def __init__(self, config: AuthorityConfig, on_ready: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                _app(config),
                access_log=False,
                log_config=None,
                server_header=False,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
            )
        )
        self._wanted = config
        self._on_ready = on_ready

    def listen(self) -> None:
        """Serve until told to stop."""
        with _listening(self._wanted.host, self._wanted.port) as listener:
            self.run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and self.started:
            host, port = sockets[0].getsockname()[:2]
            scheme = "https" if self._wanted.tls_cert else "http"
            self._on_ready(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise PortTaken(
            f"{host}: cannot listen on port {port}: {error.strerror or error}; choose another with --port"
        ) from error
    with listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener
