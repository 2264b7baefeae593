"""HTTP servers on public ports: their configuration and their URLs."""

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
    """The HTTP settings of a port: HTTPS if it has a certificate. A stop waits `drain_s` seconds for open requests."""

    tls_cert: Path | None
    tls_key: Path | None
    drain_s: float

    def url(self, listener: socket.socket) -> str:
        """The URL of a listening socket."""
        scheme = "https" if self.tls_cert else "http"
        host, port = listener.getsockname()[:2]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def uvicorn(self, app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Config:
        """These settings for uvicorn, which serves `app` on a `Listener` with the same limits."""
        return uvicorn.Config(
            app,
            http=cast("type[Connection]", partial(Connection, limits)),
            ws="none",
            loop="asyncio",  # even if uvloop is installed, whose turns differ from what CheckInShedder assumes
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
