"""Routes of operators: the admin API, its access and its problems."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.authentication import PERSON, authenticate, for_person
from coordinator.api.http import ADMIN_PROBLEMS, read_as, read_hashed
from coordinator.api.openapi import BYTES, HEALTH, Answer, ApiDocument
from coordinator.api.service import Service, matching
from coordinator.driver.watch import send_trial
from coordinator.errors import BadToken, InvalidTask, MalformedMessage, RoleLacking, Unavailable
from coordinator.operations import OPERATIONS, PREFIX, NewTask, Operation
from coordinator.rules.alerts import Assumption
from coordinator.rules.entities import NOT_BOTH, Role, Task, Token
from coordinator.rules.kinds import kind_of
from coordinator.rules.selection import Matching
from coordinator.rules.task_settings import TaskSettings
from coordinator.security import of_running
from coordinator.store.tasks import CoordinatorStore
from fedcore.errors import WrongBody
from fedcore.release import Signed
from fedcore.validation import UNDECODABLE, build, decoder

# The admin API: tasks over HTTP, for operators, with health checks and metrics.


_BEARER = HTTPBearer(auto_error=False, description="A token that `muster coordinator token` printed.")
_HERE = re.compile(r"(?:127\.0\.0\.1|\[::1\]|localhost)(?::[0-9]+)?")
_LOOPBACK = Token(id="loopback", name="loopback", role=Role.VIEWER, created_at=0.0, expires_at=math.inf)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


class Access:
    """Tokens of requests, as FastAPI dependencies. They read the database, and so run in threads."""

    def __init__(self, service: Service) -> None:
        self._database = service.store.database
        self._loopback = service.settings.loopback_viewer

    def guard(
        self, role: Role, *, whole: bool = False
    ) -> Callable[[Request, HTTPAuthorizationCredentials | None], None]:
        """What demands a token of at least a role, and keeps it as `token` in the request's state.

        whole: one that is not limited to populations. It raises BadToken or RoleLacking.
        """

        def demand(request: Request, credentials: Credentials) -> None:
            text = None if credentials is None else credentials.credentials
            token = self.without_token(request) if text is None else authenticate(self._database, text)
            if token is None:
                raise BadToken("send a token: Authorization: Bearer muster_…; `muster coordinator token` makes one")
            token.demand(role)
            if token.proxy:  # a browser sends what others' pages ask for, and only forms of the dashboard show that
                raise RoleLacking(f"the token {token.id} of {token.name} is a proxy's, for the pages of the dashboard")
            if whole:
                token.demand_unlimited()
            request.state.token = token

        return demand

    def without_token(self, request: Request) -> Token | None:
        """The loopback viewer, where the setting allows one; else None."""
        # By the Host: a page of another site, rebound to loopback, names that site.
        return _LOOPBACK if self._loopback and _HERE.fullmatch(request.headers.get("host", "")) else None

    def of_proxy(self, request: Request) -> Token | None:
        """The token of a proxy with the person whom it names; None where nobody is named.

        Raises BadToken, and RoleLacking for a name from others than proxies: neither must look like a lost session.
        """
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        named = request.headers.getlist(PERSON)
        return for_person(authenticate(self._database, text), named) if named and scheme.lower() == "bearer" else None


def create_task(service: Service, new: NewTask, token: Token) -> Task:
    """Register a task that the holder of a token asks for. Raises UnknownBlob, and as `register_task` of the store.

    It reads and writes blobs, so it runs in a thread.
    """
    if new.settings.secagg is not None and service.settings.authority is None:
        raise InvalidTask(
            "secure rounds need an enrolment authority, and this coordinator has none: run `muster authority "
            "serve`, and start the coordinator with --authority and --authority-url"
        )
    asks = kind_of(new.manifest.algorithm.name) == "question"
    if asks and new.settings.privacy is None and service.settings.questions_need_noise:
        raise InvalidTask(
            "this coordinator refuses questions without noise (questions_need_noise): give the question privacy, as "
            "`muster ask` does with --epsilon and --users"
        )
    if new.evaluates is not None and new.evaluation is not None:
        raise InvalidTask(NOT_BOTH)
    evaluation = new.evaluates or new.evaluation
    return service.store.limited(token.populations).register_task(
        new.manifest, new.settings, new.release, token.signature, name=new.name, evaluation=evaluation
    )


_BOUNDS = {
    "round": Query(ge=0, lt=2**31),
    "after": Query(ge=0, lt=2**63),
    "limit": Query(ge=1, le=1000),
    "revoked": Query(),
    "version": Query(ge=1, lt=2**31),
    "share": Query(),
    "epsilon": Query(),
    "delta": Query(),
    "gate": Query(max_length=200),
    "where": Query(),
    "part": Query(pattern="^[0-9a-f]{64}$"),
}
"""What the parameters of queries may be, by name."""
_OF_PATH = {"{task}": "unknown-task", "{device}": "no-such-device", "{name}": "unknown-model"}
"""The problem of a path in which the name is of nothing that exists."""

ADMIN = ApiDocument(
    problems=ADMIN_PROBLEMS,
    everywhere=("bad-token", "internal", "unavailable"),
    messages=tuple(
        kind
        for operation in OPERATIONS
        for kind in (operation.answer, operation.takes)
        if kind not in (bytes, None, type(None))
    ),
)


class AdminApi:
    """Operations that the store has not. `upload`, `create` and `release_model` read a body, so they are endpoints."""

    def __init__(self, service: Service) -> None:
        self._service, self._settings = service, service.settings

    def security(self) -> Sequence[Assumption]:
        """As `AdminService` says."""
        return of_running(self._settings, self._service.store)

    def matching(self, token: Token, population: str, where: str = "") -> Matching:
        """As `AdminService` says, for the holder of a token."""
        return matching(self._service, token, population, where)

    def test_alerts(self) -> None:
        """As `AdminService` says."""
        send_trial(self._service.webhook)

    async def upload(self, sha256: str, request: Request) -> Response:
        """Store the body."""
        data, digest = await read_hashed(request, self._settings.upload_limit_bytes)
        if digest.hex() != sha256:
            raise WrongBody("the body does not have the SHA-256 that the address names, as 64 lower-case hex digits")
        await run_in_threadpool(store_for(self._service, request).upload, data)
        return Response(status_code=204)

    async def create(self, request: Request) -> Response:
        """Start the task that the body asks for."""
        data, _ = await read_hashed(request, self._settings.message_limit_bytes)
        new = _new_task(bytes(data))
        return _response(await run_in_threadpool(create_task, self._service, new, request.state.token), 201)

    async def release_model(self, request: Request) -> Response:
        """Release the version of a model whose signed statement is the body."""
        data, _ = await read_hashed(request, self._settings.message_limit_bytes)
        signed = read_as(data, Signed)
        store = store_for(self._service, request)
        return _response(await run_in_threadpool(store.release_model, signed, _by(request)), 201)


class Endpoint:
    """The endpoint of an operation without a body: calls a method with what path and query hold.

    The method is the API's own, or of the store as the request's token may see it. One with a parameter `by` is told
    who calls it, and one with `token` by which token. FastAPI reads the signature, and runs the endpoint in a thread.
    """

    def __init__(self, operation: Operation, service: Service, api: AdminApi) -> None:
        self._service, self._own = service, getattr(api, operation.name, None)
        self._name, self._status = operation.name, operation.status
        self._names = {name: parameter.name for name, parameter in operation.parameters.items()}
        act = self._own or getattr(service.store, operation.name)
        self._told = {"by", "token"} & inspect.signature(act).parameters.keys()
        asked = [
            parameter.replace(name=name, kind=parameter.KEYWORD_ONLY, annotation=_bounded(name, parameter.annotation))
            for name, parameter in operation.parameters.items()
        ]
        request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
        self.__signature__ = inspect.Signature([request, *asked])

    def __call__(self, request: Request, **asked: Any) -> Response:
        """Answer a request."""
        arguments = {self._names[name]: value for name, value in asked.items()}
        arguments |= {name: {"by": _by(request), "token": request.state.token}[name] for name in self._told}
        act = self._own or getattr(store_for(self._service, request), self._name)
        return _response(act(**arguments), self._status)


def admin_router(service: Service, access: Access) -> APIRouter:
    """The routes of the admin API: those of every operation, each behind its role."""
    api, router = AdminApi(service), APIRouter(prefix=PREFIX, tags=["admin"])
    for operation in OPERATIONS:
        router.add_api_route(
            operation.path,
            getattr(api, operation.name) if operation.takes else Endpoint(operation, service, api),
            methods=[operation.method],
            name=operation.name,
            description=operation.sentence,
            dependencies=[Depends(access.guard(operation.role, whole=operation.whole))],
            **_described(operation),
        )
    return router


def _described(operation: Operation) -> dict[str, Any]:
    """What the document says of an operation."""
    problems = [slug for name, slug in _OF_PATH.items() if name in operation.path]
    problems.append("role-lacking")
    if operation.parameters.keys() & _BOUNDS.keys():
        problems.append("malformed-message")
    if operation.takes:
        problems.append("too-large")
    body = () if operation.answer is type(None) else (_media(operation.answer),)
    answers = {operation.status: Answer("Found" if operation.method == "GET" else "Done", body)}
    return ADMIN.route(answers, (*problems, *operation.problems), takes=_media(operation.takes))


def _media(kind: Any) -> Any:
    return BYTES if kind is bytes else kind


def _bounded(name: str, kind: Any) -> Any:
    """The type of a parameter, as FastAPI wants it: one that is not in the query is in the path."""
    return Annotated[kind, _BOUNDS[name]] if name in _BOUNDS else kind


def store_for(service: Service, request: Request) -> CoordinatorStore:
    """The store as the token of a request may see it."""
    token: Token = request.state.token
    return service.store.limited(token.populations)


def _by(request: Request) -> str:
    token: Token = request.state.token
    return token.signature


def _response(value: object, status: int) -> Response:
    if value is None or isinstance(value, bytes):
        return Response(value, status, media_type=BYTES if value else None)
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _new_task(data: bytes) -> NewTask:
    """Raises MalformedMessage; InvalidTask when a setting is unknown, missing or not what it may be."""
    try:
        posted = _POSTED.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(str(error)) from error
    return NewTask(**msgspec.structs.asdict(posted) | {"settings": build(TaskSettings, posted.settings)})


class _Posted(NewTask, frozen=True):
    """A NewTask whose settings are yet to be checked."""

    settings: dict[str, Any]  # type: ignore[assignment]


_POSTED = decoder(_Posted)


def health_router(service: Service) -> APIRouter:
    """`/healthz`: the process answers. `/readyz`: it can also serve devices."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", **HEALTH.route({200: Answer("The process answers")}))
    async def healthz() -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @router.get("/readyz", **HEALTH.route({200: Answer("Devices may come")}))
    async def readyz() -> Response:
        """The driver runs, reads and writes the database, others reach this replica, and no stop is under way."""
        # Nothing here waits, for a database or for a thread.
        if not service.driver.alive:
            raise Unavailable("the driver is not running")
        if service.driver.draining:
            raise Unavailable("the coordinator is about to stop")
        if service.membership.ousted:
            raise Unavailable("another replica announces the same URL; give each its own as replica_url")
        if service.membership.superseded:
            raise Unavailable("the server's key was succeeded, and this replica has the file of the old one")
        if obstacle := service.driver.obstacle:
            raise Unavailable(obstacle)
        return JSONResponse({"status": "ready"})

    return router


def metrics_router(service: Service) -> APIRouter:
    """`/metrics`, for Prometheus."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", **ADMIN.route({200: Answer("The metrics", ("text/plain",))}))
    def read() -> Response:
        """All metrics, in Prometheus' text format."""
        try:
            service.metrics.tasks_are(service.store.progress())
        except Unavailable:
            # The other metrics do not need the database, but tokens do: without it only the loopback viewer comes here.
            # A token that was good a moment ago is not believed: it may be revoked, and the example's alert that no
            # coordinator gives its metrics is how people learn that the database is away.
            service.metrics.stalled.clear()
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
