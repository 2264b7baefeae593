"""Access to the admin port: the token of a request, and its role."""

from __future__ import annotations

import math
import re
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request

from coordinator.api.service import Service
from coordinator.api.tokens import authenticate
from coordinator.errors import BadToken
from coordinator.rules.entities import Role, Token

_BEARER = HTTPBearer(auto_error=False, description="A token that `muster coordinator token` printed.")
_HERE = re.compile(r"(?:127\.0\.0\.1|\[::1\]|localhost)(?::[0-9]+)?")
_LOOPBACK = Token(id="loopback", name="loopback", role=Role.VIEWER, created_at=0.0, expires_at=math.inf)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


class Access:
    """Tokens of requests, as FastAPI dependencies. They read the database, and so run in threads."""

    def __init__(self, service: Service) -> None:
        self._database = service.store.database
        self._loopback = service.settings.loopback_viewer

    def metrics(self, request: Request, credentials: Credentials) -> Token:
        """The token of whoever may read metrics, which any token may. Raises BadToken."""
        if credentials is not None:
            return authenticate(self._database, credentials.credentials)
        viewer = self.without_token(request)
        if viewer is not None:
            return viewer
        raise BadToken("send a token: Authorization: Bearer muster_…; `muster coordinator token` makes one")

    def viewer(self, request: Request, credentials: Credentials) -> Token:
        """The token of a viewer or an operator; the request's state keeps it as `token`. Raises as `operator`."""
        request.state.token = token = self.metrics(request, credentials)
        token.demand(Role.VIEWER)
        return token

    def operator(self, request: Request, credentials: Credentials) -> Token:
        """The token of an operator, who may change tasks. Raises BadToken or RoleLacking."""
        token = self.viewer(request, credentials)
        token.demand(Role.OPERATOR)
        return token

    def without_token(self, request: Request) -> Token | None:
        """The loopback viewer, where the setting allows one; else None."""
        return _LOOPBACK if self._loopback and _names_this_machine(request) else None


def _names_this_machine(request: Request) -> bool:
    """Whether the request's Host is this machine: a page of another site, rebound to loopback, names that site."""
    return _HERE.fullmatch(request.headers.get("host", "")) is not None
