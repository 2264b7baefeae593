"""HTML of the dashboard: templates, headers, times, and web sessions; its forms and downloads."""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import parse_qsl, quote

import jinja2
import msgspec
from fastapi import Depends
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from coordinator.api.admin import Access
from coordinator.api.authentication import authenticate, end_session, token_of_session
from coordinator.api.http import ADMIN_ERRORS, ADMIN_PROBLEMS, slug_of
from coordinator.api.openapi import BYTES
from coordinator.api.service import Service
from coordinator.dashboard.curves import HEIGHT, WIDTH
from coordinator.errors import (
    BadToken,
    ForgedForm,
    MalformedMessage,
    Refusal,
    RoleLacking,
    StoreConflict,
    TooLarge,
    UnknownBlob,
    UnknownRound,
)
from coordinator.rules.budget import in_words
from coordinator.rules.buffers import mean_staleness
from coordinator.rules.entities import Role, Token
from coordinator.store.tasks import CoordinatorStore
from fedcore.algorithms.evaluation import PERCENTILES
from fedcore.errors import visible_lines
from fedcore.questions.answer import as_csv
from fedcore.validation import text_of
from fedcore.wire.messages import PROBLEMS

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60))


def clock(at: float) -> str:
    """A time, in seconds since 1970, as one of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def date(at: float) -> str:
    """A time, in seconds since 1970, as a date and a time of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    """A duration in its largest unit of days, hours, minutes or seconds."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# Web sessions: a signed cookie that names a token, and the CSRF tokens of the forms that it may send.
#
# The key is the same at all replicas. At every request the token is looked up, and whether a logout ended the session:
# a token that was revoked or expired ends its sessions at once. Nothing is stored but the sessions that a logout ended.

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
        """Whether a token was shown: a viewer on this machine may need none, and nor does a person of a proxy."""
        return self.token is not None and self.token.id != "loopback" and not self.token.person

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
        session, token = self._read(request), self._access.of_proxy(request)
        if session is None:
            return self._begin(token or self._access.without_token(request), "", _BEFORE_LOGIN_S)
        if token is None and session.token_id:
            token = token_of_session(self._database, session.token_id, session.nonce)
        elif token is None:
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


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Renderer:
    """Pages and parts of them, from templates in which all that is not marked up is escaped."""

    def part(self, template: str, visitor: Visitor, **seen: Any) -> str:
        """A part of a page, or all of it, for a visitor."""
        return _templates().get_template(template).render(visitor=visitor, **seen)

    def page(self, request: Request, visitor: Visitor, template: str, status: int = 200, **seen: Any) -> Response:
        """A page for a visitor, with the cookie of a session that began with it."""
        html = self.part(template, visitor, **seen)
        response = Response(html, status, HEADERS, media_type="text/html")
        visitor.give(request, response)
        return response

    def login(self, request: Request, visitor: Visitor, status: int = 401, wrong: str = "") -> Response:
        """The form that asks for a token. wrong: what was wrong with the last one."""
        return self.page(request, visitor, "login.html", status, wrong=wrong)

    def problem(self, request: Request, visitor: Visitor, status: int, what: str, back: str = "/") -> Response:
        """A page that says why something was not done."""
        return self.page(request, visitor, "problem.html", status, what=what, back=back)


@functools.cache
def _templates() -> jinja2.Environment:
    """The templates, each read and compiled once in a process."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("coordinator.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finished,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {
        "width": WIDTH,
        "height": HEIGHT,
        "csrf_field": CSRF_FIELD,
        "percentiles": PERCENTILES,
    }
    templates.filters |= {"date": date, "clock": clock, "age": age, "text": text_of, "bytes": _bytes}
    templates.filters |= {"mean_staleness": mean_staleness, "percent": _percent, "epsilon": in_words}
    return templates


def model_page_of(population: str, name: str) -> str:
    """The address of a model's page."""
    return f"/populations/{quote(population, safe='')}/models/{quote(name, safe='')}"


def page_of(task: str) -> str:
    """The address of a task's page."""
    return f"/tasks/{quote(task, safe='')}"


def redirect(to: str) -> Response:
    """The answer to a form that succeeded: the browser loads a page, and loading it again repeats nothing."""
    return RedirectResponse(to, 303, headers=HEADERS)


def _finished(value: object) -> object:
    """What an expression of a template gives, with text of strangers made visible."""
    return visible_lines(value) if type(value) is str else value


def _percent(share: float) -> str:
    """A share from 0 to 1 in percent."""
    return f"{100 * share:.6g} %"


def _bytes(count: int) -> str:
    """A number of bytes in the largest of their units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


Number: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
"""The number of a round, or of an attempt at one, in an address."""
RowId: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
SHOWN: tuple[type[Exception], ...] = (*ADMIN_ERRORS.values(), StoreConflict, MalformedMessage, TooLarge, UnknownBlob)
"""The errors for which a page says why something was not done."""


def status_of(error: Exception) -> int:
    """The status of a page that shows one of the errors in SHOWN, as its problem type has it."""
    if isinstance(error, StoreConflict):
        return 409
    return PROBLEMS[error.slug].status if isinstance(error, Refusal) else ADMIN_PROBLEMS[slug_of(error)].status


async def read_fields(request: Request, limit: int) -> dict[str, str]:
    """The fields of a form, the last of each name. Raises TooLarge for one of more than `limit` bytes."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise TooLarge(f"this form is too long: at most {limit:,} bytes are read")
    return dict(parse_qsl(data.decode(errors="replace"), keep_blank_values=True))


class Endpoints:
    """Endpoints of the dashboard, with the sessions of visitors and the pages for them."""

    def __init__(self, service: Service, sessions: WebSessions, renderer: Renderer) -> None:
        self._service = service
        self._sessions, self._renderer = sessions, renderer

    def _store(self, token: Token) -> CoordinatorStore:
        """The store as the holder of a token may see it."""
        return self._service.store.limited(token.populations)

    def _operate(
        self, request: Request, fields: Mapping[str, str], page: str, act: Callable[[Visitor, Token], Response | None]
    ) -> Response:
        """Let an operator `act`, by a form: then its answer or, without one, the way to a page."""
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            return self._renderer.login(request, visitor)
        try:
            self._sessions.check_form(visitor, fields)
            visitor.token.demand(Role.OPERATOR)
            return act(visitor, visitor.token) or redirect(page)
        except SHOWN as error:
            return self._renderer.problem(request, visitor, status_of(error), str(error), page)


# Forms of the dashboard and downloads from it: login, what an operator does with a task, files of tasks.


_FORM_BYTES = 4096
Act: TypeAlias = Callable[[str, str], object]


async def _form(request: Request) -> dict[str, str]:
    return await read_fields(request, _FORM_BYTES)


Fields: TypeAlias = Annotated[dict[str, str], Depends(_form)]
"""The fields of a short form."""


class Actions(Endpoints):
    """What forms do. Each asks for the CSRF token of the session, and those that change tasks for an operator."""

    def login(self, request: Request, fields: Fields) -> Response:
        """Begin a session for the token in the form."""
        visitor = self._sessions.visitor(request)
        try:
            self._sessions.check_form(visitor, fields)
            token = authenticate(self._service.store.database, fields.get("token", ""))
            if token.proxy:
                raise BadToken("the token is a proxy's, and opens no session")
            token.demand(Role.VIEWER)
        except ForgedForm as error:
            return self._renderer.login(request, visitor, 403, wrong=str(error))
        except (BadToken, RoleLacking) as error:
            return self._renderer.login(request, visitor, 401, wrong=f"You are not logged in: {error}.")
        response = redirect("/")
        self._sessions.begin(token).give(request, response)
        return response

    def logout(self, request: Request, fields: Fields) -> Response:
        """End the session, in this browser and in any other that has its cookie."""
        visitor = self._sessions.visitor(request)
        try:
            self._sessions.check_form(visitor, fields)
        except ForgedForm as error:
            return self._renderer.problem(request, visitor, 403, str(error))
        self._sessions.end(request)
        response = redirect("/")
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return response

    def change(self, request: Request, task: str, verb: str, fields: Fields) -> Response:
        """Pause, resume, cancel or roll back a task."""

        def act(_: Visitor, token: Token) -> None:
            self._act(verb, fields, self._store(token))(task, token.signature)

        return self._operate(request, fields, page_of(task), act)

    def _act(self, verb: str, fields: dict[str, str], store: CoordinatorStore) -> Act:
        """What a verb does to a task, for somebody. Raises UnknownRound."""
        if verb == "rollback":
            number = _round_number(fields.get("round", ""))
            return lambda task, by: store.roll_back(task, number, by)
        acts: dict[str, Act] = {"pause": store.pause, "resume": store.resume, "cancel": store.cancel}
        if verb not in acts:
            raise HTTPException(404, "Not Found")
        return acts[verb]


def _round_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UnknownRound(f"{text!r} is not a round's number: choose one whose model is kept")
    return int(text)


_JSON = "application/json"


class Downloads(Endpoints):
    """Files of a task, for those who may view pages. Errors are those of the admin API."""

    def model(self, request: Request, task: str, round: Number | None = None) -> Response:
        """The model after a committed round, by default the last; the audit log says who read it."""
        token = self._viewer(request)
        data = self._store(token).model(task, round, token.signature)
        return _file(data, BYTES, f"{task}{'' if round is None else f'-round-{round}'}.safetensors")

    def plan(self, request: Request, task: str) -> Response:
        """The plan that devices execute."""
        return _file(self._store(self._viewer(request)).plan_part(task), _JSON, f"{task}-plan.json")

    def certificate(self, request: Request, task: str) -> Response:
        """The proof, made at export, that the plan's graphs compute what they should."""
        store = self._store(self._viewer(request))
        data = store.blobs.get(store.task(task).certificate_sha256)
        return _file(data, _JSON, f"{task}-certificate.json")

    def privacy_certificate(self, request: Request, task: str, round: Number | None = None) -> Response:
        """The privacy certificate of the model after a round, by default the last, with its ledger."""
        token = self._viewer(request)
        data = msgspec.json.encode(self._store(token).certificate(task, round, token.signature))
        return _file(data, _JSON, f"{task}.safetensors.privacy.json")

    def answer(self, request: Request, task: str, form: Literal["csv", "json"] = "json") -> Response:
        """The answer to the question of a task."""
        token = self._viewer(request)
        found = self._store(token).answer(task, token.signature)
        if form == "csv":
            text = as_csv(found.columns, found.rows, found.errors)
            return _file(text.encode(), "text/csv; charset=utf-8", f"{task}-answer.csv")
        return _file(msgspec.json.encode(found), _JSON, f"{task}-answer.json")

    def _viewer(self, request: Request) -> Token:
        """Raises BadToken."""
        token = self._sessions.visitor(request).token
        if token is None:
            raise BadToken("log in first")
        return token


def _file(data: bytes, kind: str, name: str) -> Response:
    # A task's id is hexadecimal digits, so that the name needs no quoting.
    return Response(data, headers=HEADERS | {"Content-Disposition": f'attachment; filename="{name}"'}, media_type=kind)
