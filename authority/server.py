"""The authority as a process: its key's file, its port, and its end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from authority.attestation import Attestation
from authority.beacons import Beacons
from authority.errors import KeyMissing
from authority.issuer import Issuer
from authority.service import authority_app
from fedcore.signing import key_text, public_key
from fedcore.succession import SucceedingKey
from ingress.addresses import Network
from ingress.connection_limits import ConnectionLimits
from ingress.listener import listening
from ingress.newcomers import Newcomers
from ingress.origins import open_to
from ingress.server import HttpConfig

DAY_S = 86_400
DRAIN_S = 10.0
"""How long a stop waits for requests in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityConfig:
    """How an authority runs. key: the file of its private key. credential_days: for how long a credential is good.

    server_keys: the public keys, as text, of the coordinators for which it draws beacons. connection_limit: how many
    connections may wait for a request, and how many bodies may be on their way; address_connection_limit: how many of
    one address may wait; address_limit_per_minute: how many credentials one address may ask for, and how many beacons;
    0 is no limit. Those of `proxies` are not limited by address. The defaults are within the 1024 open files that a
    process may usually have. origins: of the web pages that may be devices.
    """

    key: Path
    host: str = "127.0.0.1"
    port: int = 8082
    accept_unattested: bool = False
    enrolment_secret_file: Path | None = None
    android_file: Path | None = None
    apple_file: Path | None = None
    credential_days: float = 30.0
    server_keys: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    connection_limit: int = 400
    address_connection_limit: int = 100
    address_limit_per_minute: int = 600
    proxies: tuple[Network, ...] = ()
    origins: tuple[str, ...] = ()

    def issuer(self) -> Issuer:
        """What issues credentials. Raises KeyMissing, InvalidKey, BadSecret, BadAndroidFile or BadAppleFile."""
        if not self.key.exists():
            raise KeyMissing(
                f"there is no key at {self.key}: `muster authority new-key {self.key}` makes one, and if there was "
                "one, put it back, since devices trust no other"
            )
        files = self.enrolment_secret_file, self.android_file, self.apple_file
        attestation = Attestation.of(self.accept_unattested, *files)
        return Issuer(SucceedingKey.load("authority", self.key), attestation, int(self.credential_days * DAY_S))


def serve(config: AuthorityConfig, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM or SIGINT. on_ready: called with the URL once requests are answered.

    Raises ingress.errors.CannotListen, and as `AuthorityConfig.issuer`.
    """
    AuthorityServer(config, on_ready).run()


def _app(config: AuthorityConfig) -> Starlette:
    issuer = config.issuer()
    servers = {key_text(public_key(text).public_bytes_raw()) for text in config.server_keys}
    newcomers = Newcomers(config.connection_limit)
    return authority_app(issuer, Beacons(issuer.key.private, servers), newcomers, config.address_limit_per_minute)


class AuthorityServer(uvicorn.Server):
    """The HTTP server of an authority. on_ready: called with the URL once requests are answered."""

    def __init__(self, config: AuthorityConfig, on_ready: Callable[[str], None]) -> None:
        self._limits = ConnectionLimits(config.connection_limit, config.address_connection_limit, config.proxies)
        self._http = HttpConfig(tls_cert=config.tls_cert, tls_key=config.tls_key, drain_s=DRAIN_S)
        super().__init__(self._http.uvicorn(open_to(config.origins, _app(config)), self._limits))
        self._wanted = config
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and serve until it is to stop. Raises ingress.errors.CannotListen."""
        with listening(self._wanted.host, self._wanted.port, self._limits) as listener:
            super().run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say the URL."""
        await super().startup(sockets)
        if sockets and self.started:
            self._on_ready(self._http.url(sockets[0]))
