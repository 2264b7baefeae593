"""The form that creates a task: the blobs of a bundle are uploaded first, then its manifest comes with the settings."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.admin.task_creation import create_task
from coordinator.api.http import read_hashed
from coordinator.api.service import Service
from coordinator.dashboard.forms import SHOWN, read_fields, status_of
from coordinator.dashboard.rendering import HEADERS, Renderer, page_of, redirect
from coordinator.dashboard.settings_table import from_form, groups, values
from coordinator.dashboard.web_sessions import CSRF_FIELD, Visitor, WebSessions
from coordinator.errors import BadToken, InvalidTask, TooLarge, UnknownTask
from coordinator.operations import NewTask
from coordinator.rules.entities import Evaluates, RegularEvaluation, Role, Token
from coordinator.rules.private_sums import as_asked
from fedcore.bundle import Manifest
from fedcore.decoding import UNDECODABLE, decoder
from fedcore.errors import WrongBody
from fedcore.release import Signed

_MANIFEST, _RELEASE = decoder(Manifest), decoder(Signed)
_CSRF_HEADER = "X-CSRF-Token"
T = TypeVar("T")


class NewTaskForm:
    """The endpoints of the form."""

    def __init__(self, service: Service, sessions: WebSessions, renderer: Renderer) -> None:
        self._service = service
        self._sessions = sessions
        self._renderer = renderer

    def form(self, request: Request, clone: str = "") -> Response:
        """The form, with every setting, its meaning and its default. clone: a task whose values fill it in."""
        visitor = self._sessions.visitor(request)
        if not visitor.operates:
            return self._refuse(request, visitor)
        try:
            return self._show(request, visitor, 200, self._fields_of(clone) if clone else {}, "")
        except UnknownTask as error:
            return self._show(request, visitor, status_of(error), {}, str(error))

    async def upload(self, request: Request, sha256: str) -> Response:
        """Store a blob of a bundle, for an operator's page.

        Raises BadToken, RoleLacking, ForgedForm or WrongBody.
        """
        await run_in_threadpool(self._demand_operator, request)
        data, digest = await read_hashed(request, self._service.settings.upload_limit_bytes)
        if digest.hex() != sha256:
            raise WrongBody(f"{sha256[:12]}… is not the SHA-256 of that file: the bundle is damaged")
        await run_in_threadpool(self._service.store.blobs.put, data)
        return Response(status_code=204, headers=HEADERS)

    async def create(self, request: Request) -> Response:
        """Create the task, or show the form again with what is wrong. A form of others than operators is not read."""
        visitor = await run_in_threadpool(self._sessions.visitor, request)
        if visitor.token is None or not visitor.operates:
            return self._refuse(request, visitor)
        try:
            fields = await read_fields(request, self._service.settings.message_limit_bytes)
        except TooLarge as error:
            return self._show(request, visitor, status_of(error), {}, str(error))
        return await run_in_threadpool(self._create, request, visitor, visitor.token, fields)

    def _create(self, request: Request, visitor: Visitor, operator: Token, fields: dict[str, str]) -> Response:
        try:
            self._sessions.check_form(visitor, fields)
            manifest, release, name = (fields.get(field, "").strip() for field in ("manifest", "release", "name"))
            if not manifest:
                raise InvalidTask("choose the folder of a bundle, as `muster export` wrote it")
            bundle = _decoded(_MANIFEST, manifest, "a bundle's manifest")
            signed = _decoded(_RELEASE, release, "a release, as `muster task release` writes it") if release else None
            new = NewTask(bundle, from_form(fields), signed, name or None, *self._evaluations(fields, bundle))
            task = create_task(self._service, new, operator.signature)
        except SHOWN as error:
            return self._show(request, visitor, status_of(error), fields, str(error))
        return redirect(page_of(task.id))

    def _fields_of(self, task_id: str) -> dict[str, str]:
        """The fields of the form with which a task like this one is created."""
        store = self._service.store
        task = store.task(task_id)
        fields = {
            "clone": task_id,
            "name": task.name,
            "manifest": msgspec.json.encode(store.manifest(task_id)).decode(),
        }
        if task.release is not None:
            fields["release"] = msgspec.json.encode(task.release).decode()
        kept = msgspec.to_builtins(as_asked(task.settings))
        optional = {group.name: "yes" for group in groups() if group.optional and kept[group.name] is not None}
        return fields | optional | values(as_asked(task.settings))

    def _evaluations(
        self, fields: dict[str, str], bundle: Manifest
    ) -> tuple[Evaluates | None, RegularEvaluation | None]:
        """What a task evaluates, and how its models are: as of the task that it clones, on the same bundle."""
        store, clone = self._service.store, fields.get("clone")
        if not clone or bundle != store.manifest(clone):
            return None, None
        task = store.task(clone)
        return task.evaluates, task.evaluation

    def _refuse(self, request: Request, visitor: Visitor) -> Response:
        status = 403 if visitor.token else 401
        return self._renderer.login(request, visitor, status, "Only an operator creates tasks.")

    def _show(self, request: Request, visitor: Visitor, status: int, fields: dict[str, str], wrong: str) -> Response:
        return self._renderer.page(request, visitor, "new.html", status, groups=groups(), given=fields, wrong=wrong)

    def _demand_operator(self, request: Request) -> None:
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            raise BadToken("log in first")
        self._sessions.check_form(visitor, {CSRF_FIELD: request.headers.get(_CSRF_HEADER, "")})
        visitor.token.demand(Role.OPERATOR)


def _decoded(message: msgspec.json.Decoder[T], text: str, what: str) -> T:
    """Raises InvalidTask."""
    try:
        return message.decode(text.encode())
    except UNDECODABLE as error:
        raise InvalidTask(f"this is not {what}: {error}") from error
