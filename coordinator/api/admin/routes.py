"""The admin API: tasks over HTTP, for operators. Roles, problem types and examples: docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeAlias

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.admin.access import Access
from coordinator.api.admin.problems import ADMIN_PROBLEMS
from coordinator.api.admin.task_creation import NewTask, TaskCreation
from coordinator.api.http import read_hashed
from coordinator.api.openapi import BYTES, Answer, ApiDocument, BodyType
from coordinator.api.service import Service
from coordinator.certificates import certify
from coordinator.errors import DigestMismatch, MalformedMessage, UnknownBlob
from coordinator.rules.audit import AuditEntry
from coordinator.rules.entities import Device, RoundRecord, SessionShape, Spent, Task, Token, Transition
from coordinator.rules.progress import Progress
from coordinator.rules.task_settings import TaskSettings
from coordinator.security import Assumption, of_running
from fedcore.bundle import Manifest
from fedcore.decoding import UNDECODABLE, decoder
from fedcore.privacy.certificate import CertifiedLedger
from fedcore.release import Signed
from fedcore.validation import build

PREFIX = "/admin/v1"
RoundNumber: TypeAlias = Annotated[int, Query(ge=0, lt=2**31)]
EntryNumber: TypeAlias = Annotated[int, Query(ge=0, lt=2**63)]
Limit: TypeAlias = Annotated[int, Query(ge=1, le=1000)]


class LineageKey(msgspec.Struct, frozen=True):
    """The public key with which the coordinator signs checkpoints, as a release must name it."""

    lineage: str


ADMIN = ApiDocument(
    problems=ADMIN_PROBLEMS,
    everywhere=("bad-token", "internal", "unavailable"),
    messages=(
        Assumption,
        AuditEntry,
        CertifiedLedger,
        Device,
        LineageKey,
        NewTask,
        Progress,
        RoundRecord,
        SessionShape,
        Signed,
        Spent,
        Task,
        Transition,
    ),
)


class AdminApi:
    """The endpoints of the admin API. Those that are not `async` run in threads."""

    def __init__(self, service: Service) -> None:
        self._settings, self._store = service.settings, service.store
        self._key = service.lineage
        self._creation = TaskCreation(service)
        self._message_limit = service.settings.message_limit_bytes
        self._upload_limit = service.settings.upload_limit_bytes

    def lineage(self) -> Response:
        """The public key with which the coordinator signs checkpoints; a release names it."""
        return _json(LineageKey(self._key.signer))

    def security(self) -> Response:
        """Which assumptions on this coordinator hold, by its settings, its files and its store."""
        return _json(of_running(self._settings, self._store))

    def releases(self) -> Response:
        """The log of releases: every one that devices of secure rounds were ever shown, in order."""
        return _json(self._store.releases())

    def tasks(self) -> Response:
        """Every task, oldest first."""
        return _json(self._store.tasks())

    def task(self, task: str) -> Response:
        """One task."""
        return _json(self._store.task(task))

    def progress(self) -> Response:
        """Why each task is where it is, oldest first: a reason, and a sentence for people."""
        return _json(self._store.progress())

    def progress_of(self, task: str) -> Response:
        """Why a task is where it is: a reason, and a sentence for people."""
        (progress,) = self._store.progress(task)
        return _json(progress)

    def rounds(self, task: str) -> Response:
        """Every attempt at every round, in order."""
        return _json(self._store.rounds(task))

    def spent(self, task: str) -> Response:
        """What the task had spent of its privacy budget after each of its private rounds, in order."""
        return _json(self._store.spent(task))

    def sessions(self, task: str) -> Response:
        """Counts of sessions by their steps: those of the task, and those of its population that got no task."""
        return _json(self._store.sessions(task))

    def history(self, task: str) -> Response:
        """Every change of the task's state, in order, with its cause and time."""
        return _json(self._store.history(task))

    def model(self, task: str, request: Request, round: RoundNumber | None = None) -> Response:
        """The model after a committed round, by default the last, as named tensors in safetensors' format."""
        return Response(self._store.model(task, round, _by(request)), media_type=BYTES)

    def certificate(self, task: str, round: RoundNumber | None = None) -> Response:
        """The privacy certificate of that model, of a task that promises privacy, with the ledger that it is about."""
        return _json(certify(self._store, self._key, task, round))

    def devices(self, limit: Limit = 100, *, revoked: bool = False) -> Response:
        """The devices that enrolled last, the newest first; or those that were revoked, the last one first."""
        return _json(self._store.devices(limit, revoked=revoked))

    def revoke(self, device: str, request: Request) -> Response:
        """Refuse a device from now on. May be repeated."""
        return _json(self._store.revoke_device(device, _by(request)))

    def allow(self, device: str, request: Request) -> Response:
        """Take a revoked device back. May be repeated."""
        return _json(self._store.allow_device(device, _by(request)))

    def audit(self, after: EntryNumber | None = None, limit: Limit = 100) -> Response:
        """The first entries of the audit log after that number, or the last ones; in order."""
        return _json(self._store.audit(after, limit))

    async def upload(self, sha256: str, request: Request) -> Response:
        """Store a blob of a bundle. It is served to nobody before a task names it; unnamed ones are removed in time."""
        data, digest = await read_hashed(request, self._upload_limit)
        if digest.hex() != sha256:
            raise DigestMismatch(
                "the body does not have the SHA-256 that the address names, as 64 lower-case hex digits"
            )
        await run_in_threadpool(self._store.blobs.put, data)
        return Response(status_code=204)

    def present(self, sha256: str) -> Response:
        """Whether a blob is stored already and a row knows it, so that it need not be uploaded."""
        with self._store.database.reading() as records:
            records.blob(sha256, public=False)  # bytes that no row names may be collected before a task names them
        if not self._store.blobs.has(sha256):
            raise UnknownBlob(f"there is no blob {sha256[:12]}…")
        return Response(status_code=204)

    async def create(self, request: Request) -> Response:
        """Start a task on a bundle whose blobs are stored."""
        data, _ = await read_hashed(request, self._message_limit)
        new = _new_task(bytes(data))
        return _json(await run_in_threadpool(self._creation.create, new, _by(request)), 201)

    def pause(self, task: str, request: Request) -> Response:
        """Open no new round; the running one finishes."""
        self._store.pause(task, _by(request))
        return _json(self._store.task(task))

    def resume(self, task: str, request: Request) -> Response:
        """Undo `pause`."""
        self._store.resume(task, _by(request))
        return _json(self._store.task(task))

    def cancel(self, task: str, request: Request) -> Response:
        """End the task and abandon its running round; what was committed stays."""
        self._store.cancel(task, _by(request))
        return _json(self._store.task(task))

    def roll_back(self, task: str, round: RoundNumber, request: Request) -> Response:
        """Let a paused task go on from the model after an earlier round; 0 is the start."""
        self._store.roll_back(task, round, self._key, _by(request))
        return _json(self._store.task(task))


def admin_router(service: Service, access: Access) -> APIRouter:
    """The routes of the admin API."""
    api = AdminApi(service)
    router = APIRouter(prefix=PREFIX, tags=["admin"])
    _add_reading(router, api, access)
    _add_changing(router, api, access)
    return router


def _add_reading(router: APIRouter, api: AdminApi, access: Access) -> None:
    add = partial(router.add_api_route, methods=["GET"], dependencies=[Depends(access.viewer)])
    for path, act, kind in (
        ("/lineage", api.lineage, LineageKey),
        ("/releases", api.releases, list[Signed]),
        ("/tasks", api.tasks, list[Task]),
        ("/tasks/{task}", api.task, Task),
        ("/progress", api.progress, list[Progress]),
        ("/tasks/{task}/progress", api.progress_of, Progress),
        ("/tasks/{task}/rounds", api.rounds, list[RoundRecord]),
        ("/tasks/{task}/spent", api.spent, list[Spent]),
        ("/tasks/{task}/sessions", api.sessions, list[SessionShape]),
        ("/tasks/{task}/history", api.history, list[Transition]),
    ):
        problems = ("unknown-task",) if "{" in path else ()
        add(path, act, **ADMIN.route({200: Answer("Found", (kind,))}, problems))
    add("/devices", api.devices, **ADMIN.route({200: Answer("Found", (list[Device],))}, ("malformed-message",)))
    add("/audit", api.audit, **ADMIN.route({200: Answer("Found", (list[AuditEntry],))}, ("malformed-message",)))
    of_model = ("unknown-task", "unknown-round", "malformed-message")
    add("/tasks/{task}/model", api.model, **ADMIN.route({200: Answer("safetensors", (BYTES,))}, of_model))
    certified = ADMIN.route({200: Answer("Signed", (CertifiedLedger,))}, (*of_model, "not-private"))
    add("/tasks/{task}/certificate", api.certificate, **certified)


def _add_changing(router: APIRouter, api: AdminApi, access: Access) -> None:
    def add(method: str, path: str, act: Callable[..., Any], about: dict[str, Any]) -> None:
        router.add_api_route(path, act, methods=[method], dependencies=[Depends(access.operator)], **about)

    def route(answer: dict[int, Answer], *problems: str, takes: BodyType | None = None) -> dict[str, Any]:
        return ADMIN.route(answer, ("role-lacking", *problems), takes=takes)

    add("GET", "/security", api.security, route({200: Answer("Judged", (list[Assumption],))}))
    stored, known = {204: Answer("Stored")}, {204: Answer("Stored already")}
    add("PUT", "/blobs/{sha256}", api.upload, route(stored, "digest-mismatch", "too-large", takes=BYTES))
    add("HEAD", "/blobs/{sha256}", api.present, route(known, "unknown-blob"))
    problems = ("malformed-message", "too-large", "unknown-blob", "invalid-task", "invalid-bundle")
    add("POST", "/tasks", api.create, route({201: Answer("Created", (Task,))}, *problems, takes=NewTask))
    for verb, act in (("pause", api.pause), ("resume", api.resume), ("cancel", api.cancel)):
        about = route({200: Answer("Done", (Task,))}, "unknown-task", "task-ended")
        add("POST", f"/tasks/{{task}}:{verb}", act, about)
    of_device = route({200: Answer("Done", (Device,))}, "no-such-device")
    add("POST", "/devices/{device}:revoke", api.revoke, of_device)
    add("POST", "/devices/{device}:allow", api.allow, of_device)
    back = ("unknown-task", "unknown-round", "task-ended", "keys-differ", "malformed-message")
    add("POST", "/tasks/{task}:rollback", api.roll_back, route({200: Answer("Done", (Task,))}, *back))


def _by(request: Request) -> str:
    token: Token = request.state.token
    return token.signature


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _new_task(data: bytes) -> NewTask:
    """Raises MalformedMessage; InvalidTask when a setting is unknown, missing or not what it may be."""
    try:
        posted = _POSTED.decode(data)
    except UNDECODABLE as error:
        raise MalformedMessage(str(error)) from error
    return NewTask(posted.manifest, build(TaskSettings, posted.settings), posted.release, posted.name)


class _Posted(msgspec.Struct, frozen=True):
    """A NewTask whose settings are yet to be checked."""

    manifest: Manifest
    settings: dict[str, Any]
    release: Signed | None = None
    name: str | None = None


_POSTED = decoder(_Posted)
