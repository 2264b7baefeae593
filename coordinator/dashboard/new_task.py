"""The form that creates a task: the blobs of a bundle are uploaded first, then its manifest comes with the settings."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.admin.task_creation import create_task
from coordinator.api.http import read_hashed
from coordinator.api.service import Service
from coordinator.dashboard.forms import SHOWN, read_fields, status_of
from coordinator.dashboard.rendering import HEADERS, Renderer, page_of, redirect
from coordinator.dashboard.settings_table import field_of, folds, from_form, groups, values
from coordinator.dashboard.web_sessions import CSRF_FIELD, Visitor, WebSessions
from coordinator.errors import BadToken, InvalidTask, TooLarge, UnknownBlob, UnknownTask
from coordinator.operations import NewTask
from coordinator.rules.entities import Role, Token, check_name
from coordinator.rules.private_sums import as_asked
from fedcore.bundle import Manifest
from fedcore.decoding import UNDECODABLE, decoder
from fedcore.errors import WrongBody
from fedcore.release import Signed

_MANIFEST, _RELEASE = decoder(Manifest), decoder(Signed)
_CSRF_HEADER = "X-CSRF-Token"


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
            return self._show(request, visitor, 200, self._fields_of(clone) if clone else {}, {})
        except UnknownTask as error:
            return self._show(request, visitor, status_of(error), {}, {"": str(error)})

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
            return self._show(request, visitor, status_of(error), {}, {"": str(error)})
        return await run_in_threadpool(self._create, request, visitor, visitor.token, fields)

    def _create(self, request: Request, visitor: Visitor, operator: Token, fields: dict[str, str]) -> Response:
        try:
            self._sessions.check_form(visitor, fields)
            new = _new_task(fields)
            if not isinstance(new, NewTask):
                return self._show(request, visitor, 422, fields, new)
            new = self._evaluated(new, fields.get("clone"))
            task = create_task(self._service, new, operator.signature)
        except SHOWN as error:
            where = "manifest" if isinstance(error, UnknownBlob) else field_of(str(error))
            return self._show(request, visitor, status_of(error), fields, {where: str(error)})
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
        return fields | values(as_asked(task.settings))

    def _evaluated(self, new: NewTask, clone: str | None) -> NewTask:
        """A task with what it evaluates, and how its models are: as of the task that it clones, on the same bundle."""
        store = self._service.store
        if not clone or new.manifest != store.manifest(clone):
            return new
        task = store.task(clone)
        return replace(new, evaluates=task.evaluates, evaluation=task.evaluation)

    def _refuse(self, request: Request, visitor: Visitor) -> Response:
        status = 403 if visitor.token else 401
        return self._renderer.login(request, visitor, status, "Only an operator creates tasks.")

    def _show(
        self, request: Request, visitor: Visitor, status: int, given: Mapping[str, str], wrong: Mapping[str, str]
    ) -> Response:
        """The form with the values in `given`. wrong: sentences by the field that they are about, "" for none."""
        first = [one for one in groups()[0].settings if one.required]
        seen = {"first": first, "folds": folds(), "given": given, "wrong": wrong}
        return self._renderer.page(request, visitor, "new.html", status, **seen)

    def _demand_operator(self, request: Request) -> None:
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            raise BadToken("log in first")
        self._sessions.check_form(visitor, {CSRF_FIELD: request.headers.get(_CSRF_HEADER, "")})
        visitor.token.demand(Role.OPERATOR)


def _new_task(fields: Mapping[str, str]) -> NewTask | dict[str, str]:
    """The task that a form describes, or all that is wrong with its fields, by their names."""
    manifest, release, name = (fields.get(field, "").strip() for field in ("manifest", "release", "name"))
    settings, wrong = from_form(fields)
    bundle, signed = None, None
    try:
        if name:
            check_name(name)
    except InvalidTask as error:
        wrong["name"] = str(error)
    try:
        bundle = _MANIFEST.decode(manifest.encode())
    except UNDECODABLE as error:
        choose = "choose the folder of a bundle, as `muster export` wrote it"
        wrong["manifest"] = f"this is not a bundle's manifest: {error}" if manifest else choose
    try:
        signed = _RELEASE.decode(release.encode()) if release else None
    except UNDECODABLE as error:
        wrong["release"] = f"this is not a release, as `muster task release` writes it: {error}"
    if wrong or bundle is None or settings is None:
        return wrong
    return NewTask(bundle, settings, signed, name or None)
