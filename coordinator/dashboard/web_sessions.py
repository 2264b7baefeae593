"""Web sessions: a signed cookie that names a token, and the CSRF tokens of the forms that it may send.

The key is the same at all replicas. At every request the token is looked up, and whether a logout ended the session: a
token that was revoked or expired ends its sessions at once. Nothing is stored but the sessions that a logout ended.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.admin.access import Access
from coordinator.api.service import Service
from coordinator.api.tokens import end_session, token_of_session
from coordinator.errors import BadToken, ForgedForm
from coordinator.rules.entities import Role, Token

COOKIE = "muster-session"
CSRF_FIELD = "csrf"
LASTS_S = {Role.VIEWER: 12 * 3600, Role.OPERATOR: 3600}
"""Seconds from a login to the next one: somebody who can change tasks is asked sooner."""
_BEFORE_LOGIN_S = 3600
_COOKIE = re.compile(r"([0-9a-f]{8})?\.([0-9]{1,12})\.([A-Za-z0-9_-]{22})\.([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Visitor:
    """The sender of a request. token: None before a login, where one is needed.

    csrf: what a form on a page for this visitor must send back. cookie: one that is to be set, or "".
    """

    token: Token | None
    csrf: str
    cookie: str = ""
    lasts_s: int = 0

    @property
    def operates(self) -> bool:
        """Whether the visitor may change tasks."""
        return self.token is not None and self.token.role is Role.OPERATOR

    @property
    def logged_in(self) -> bool:
        """Whether a token was shown: a viewer on this machine may need none."""
        return self.token is not None and self.token.id != "loopback"

    def give(self, request: Request, response: Response) -> None:
        """Set the cookie of a new session."""
        if self.cookie:
            secure = request.url.scheme == "https"
            response.set_cookie(
                COOKIE, self.cookie, max_age=self.lasts_s, httponly=True, samesite="strict", secure=secure
            )


@dataclass(frozen=True, slots=True)
class _Stated:
    """A session as its cookie states it: the token's id, "" before a login; its end; and a random name of its own."""

    token_id: str
    expires_at: int
    nonce: str

    @property
    def stated(self) -> str:
        return f"{self.token_id}.{self.expires_at}.{self.nonce}"


class WebSessions:
    """The sessions of the dashboard. Its methods read the database, and so run in threads."""

    def __init__(self, service: Service, access: Access) -> None:
        self._database = service.store.database
        self._keys = service.keys
        self._access = access

    def visitor(self, request: Request) -> Visitor:
        """The sender of a request, with a new session unless its session is good."""
        session = self._read(request)
        if session is None:
            return self._begin(self._access.without_token(request), "", _BEFORE_LOGIN_S)
        if session.token_id:
            token = token_of_session(self._database, session.token_id, session.nonce)
        else:
            token = self._access.without_token(request)
        return Visitor(token, self._mac("form", session.stated))

    def begin(self, token: Token) -> Visitor:
        """A new session for a token that was shown: one from before the login is never taken over."""
        return self._begin(token, token.id, LASTS_S[token.role])

    def end(self, request: Request) -> None:
        """End the session of a request, for every copy of its cookie. A session without a token has nothing to end."""
        session = self._read(request)
        if session is not None and session.token_id:
            end_session(self._database, session.nonce, session.expires_at)

    def require_viewer(self, request: Request) -> None:
        """Raise BadToken unless the sender of a request may view pages."""
        if self.visitor(request).token is None:
            raise BadToken("log in first")

    def check_form(self, visitor: Visitor, fields: Mapping[str, str]) -> None:
        """Raise ForgedForm unless a form came from a page of this visitor."""
        if not hmac.compare_digest(visitor.csrf.encode(), fields.get(CSRF_FIELD, "").encode()):
            raise ForgedForm("this form is not from a page of your session, or that ended: load the page again")

    def _begin(self, token: Token | None, token_id: str, lasts_s: int) -> Visitor:
        stated = _Stated(token_id, int(time.time()) + lasts_s, secrets.token_urlsafe(16)).stated
        return Visitor(token, self._mac("form", stated), f"{stated}.{self._mac('cookie', stated)}", lasts_s)

    def _read(self, request: Request) -> _Stated | None:
        """What the cookie of a request states; None when it is not good."""
        match = _COOKIE.fullmatch(request.cookies.get(COOKIE, ""))
        if match is None or int(match[2]) <= time.time():
            return None
        session = _Stated(match[1] or "", int(match[2]), match[3])
        return session if hmac.compare_digest(match[4], self._mac("cookie", session.stated)) else None

    def _mac(self, purpose: str, stated: str) -> str:
        return hmac.new(self._keys.of_web_sessions, f"{purpose}.{stated}".encode(), hashlib.sha256).hexdigest()
