"""HTTP servers on ports for strangers: their configuration and their URLs."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from ingress.connection import Connection
from ingress.connection_limits import ConnectionLimits
from ingress.listener import BACKLOG


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """How a port speaks HTTP: HTTPS with a certificate; a stop waits `drain_s` seconds for requests in progress."""

    tls_cert: Path | None
    tls_key: Path | None
    drain_s: float

    def url(self, listener: socket.socket) -> str:
        """The URL at which a listening socket is reached."""
        scheme = "https" if self.tls_cert else "http"
        host, port = listener.getsockname()[:2]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def uvicorn(self, app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Config:
        """The same for uvicorn, which serves the application on a `Listener` of the same limits."""
        return uvicorn.Config(
            app,
            http=cast("type[Connection]", partial(Connection, limits)),
            ws="none",
            loop="asyncio",  # also where uvloop is installed, whose turns are not what CheckInShedder takes them for
            access_log=False,  # a path holds an assignment's secret id
            log_config=None,
            backlog=BACKLOG,
            proxy_headers=bool(limits.proxies),
            forwarded_allow_ips=list(map(str, limits.proxies)),
            server_header=False,
            ssl_certfile=self.tls_cert,
            ssl_keyfile=self.tls_key,
            timeout_graceful_shutdown=math.ceil(self.drain_s),
        )
