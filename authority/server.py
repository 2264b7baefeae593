"""The authority as a process: its key's file, its port, and its end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette

from authority.attestation import Attestation
from authority.configuration import AuthorityConfig
from authority.errors import InvalidSettings, KeyMissing
from authority.service import Beacons, Issuer, authority_app
from fedcore.signing import SucceedingKey, key_text, public_key
from ingress.limits import ConnectionLimits, Newcomers, networks
from ingress.server import HttpConfig, listening, open_to, origins

T = TypeVar("T")
DAY_S = 86_400
DRAIN_S = 10.0
"""The longest time that a stop waits for requests in progress."""


def serve(config: AuthorityConfig, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM or SIGINT. on_ready: called with the URL once requests are answered.

    Raises ingress.errors.CannotListen, InvalidSettings for text that cannot be parsed, and as `issuer_of`.
    """
    AuthorityServer(config, on_ready).run()


def issuer_of(config: AuthorityConfig) -> Issuer:
    """The issuer of credentials. Raises KeyMissing, InvalidKey, BadSecret, BadAndroidFile or BadAppleFile."""
    if not config.key.exists():
        raise KeyMissing(
            f"there is no key at {config.key}: `muster authority new-key {config.key}` makes one, and if there was "
            "one, put it back, since devices trust no other"
        )
    files = config.enrolment_secret_file, config.android_file, config.apple_file
    attestation = Attestation.of(config.accept_unattested, *files)
    return Issuer(SucceedingKey.load("authority", config.key), attestation, int(config.credential_days * DAY_S))


def _app(config: AuthorityConfig) -> Starlette:
    issuer = issuer_of(config)
    servers = {key_text(public_key(text).public_bytes_raw()) for text in config.server_keys}
    newcomers = Newcomers(config.connection_limit)
    return authority_app(issuer, Beacons(issuer.key.private, servers), newcomers, config.address_limit_per_minute)


class AuthorityServer(uvicorn.Server):
    """The HTTP server of an authority. on_ready: called with the URL once requests are answered."""

    def __init__(self, config: AuthorityConfig, on_ready: Callable[[str], None]) -> None:
        proxies = _parsed("trusted_proxies", networks, config.trusted_proxies)
        self._limits = ConnectionLimits(config.connection_limit, config.address_connection_limit, proxies)
        self._http = HttpConfig(tls_cert=config.tls_cert, tls_key=config.tls_key, drain_s=DRAIN_S)
        app = open_to(_parsed("allowed_origins", origins, config.allowed_origins), _app(config))
        super().__init__(self._http.uvicorn(app, self._limits))
        self._wanted = config
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and serve until told to stop. Raises ingress.errors.CannotListen."""
        with listening(self._wanted.host, self._wanted.port, self._limits) as listener:
            super().run([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report the URL."""
        await super().startup(sockets)
        if sockets and self.started:
            self._on_ready(self._http.url(sockets[0]))


def _parsed(name: str, parse: Callable[[str], T], texts: Sequence[str]) -> T:
    try:
        return parse(",".join(texts))
    except ValueError as error:
        raise InvalidSettings(f"{name}: {error}") from error
