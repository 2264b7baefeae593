"""The form that creates a task, and settings of tasks for people."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.admin import create_task
from coordinator.api.http import read_hashed
from coordinator.api.service import matching
from coordinator.dashboard import rendering
from coordinator.errors import BadToken, InvalidTask, TooLarge, UnknownBlob, UnknownTask
from coordinator.operations import NewTask
from coordinator.rules.entities import Role, Token, check_name
from coordinator.rules.private_sums import as_asked
from coordinator.rules.task_settings import TaskSettings
from coordinator.store.tasks import CoordinatorStore
from fedcore.bundle import Manifest
from fedcore.errors import WrongBody
from fedcore.release import Signed
from fedcore.validation import UNDECODABLE, Setting, build, build_one, complaints, decoder, settings_of, text_of

_OF_DEVICES = {"where", "min_examples", "min_separation_s", "min_separation_rounds", "hold_out_devices", "on_held_out"}


class Group(NamedTuple):
    """The settings of a part, such as `secagg.bits`. optional: whether a task, say, may do without the part."""

    name: str
    about: str
    optional: bool
    settings: tuple[Setting, ...]


@cache
def groups(kind: type = TaskSettings) -> tuple[Group, ...]:
    """All settings of a task, or of another class, by part; its own first."""
    everything = settings_of(kind)
    parts = [
        Group(
            part.name, part.about, part.optional, tuple(_within(part.name, inner) for inner in settings_of(part.part))
        )
        for part in everything
        if part.part is not None
    ]
    return Group("", "", False, tuple(setting for setting in everything if setting.part is None)), *parts


def values(settings: TaskSettings) -> dict[str, str]:
    """The values of a task's settings as text, by name, as a form gives them; of a part that it does without, none."""
    flat: dict[str, str] = {}
    for name, value in msgspec.to_builtins(settings).items():
        if isinstance(value, Mapping):
            flat |= {name: "yes"} | {f"{name}.{inner_name}": text_of(inner) for inner_name, inner in value.items()}
        elif value is not None or name not in {group.name for group in groups()}:
            flat[name] = text_of(value)
    # A task is stored with its goal where it was given no minimum.
    return flat | {"minimum": "" if settings.minimum in (None, settings.goal) else flat["minimum"]}


def told_apart(settings: TaskSettings) -> tuple[list[Setting], list[Setting]]:
    """The settings of a task that are not at their defaults, and those that are; no part that it does without."""
    given, parts = values(settings), {one.name: one for one in settings_of(TaskSettings)}
    told: tuple[list[Setting], list[Setting]] = [], []
    for group in groups():
        for one in (*([parts[group.name]] if group.optional else []), *group.settings):
            if one.name in given:
                told[not one.required and given[one.name] == one.shown_default].append(one)
    return told


def folds() -> tuple[Group, ...]:
    """All settings but those that every task must have, under headings: rounds, devices, and the parts."""
    own, *parts = groups()
    others = [one for one in own.settings if not one.required]
    return (
        Group("rounds", "How a round ends, and what follows it.", False, _those(others, of_devices=False)),
        Group("devices", "Which devices a round may draw.", False, _those(others, of_devices=True)),
        *parts,
    )


def from_form(fields: Mapping[str, str]) -> tuple[TaskSettings | None, dict[str, str]]:
    """The settings that a form gives, by name, or else what is wrong, by field (`field_of`).

    Those left empty have their defaults. A part that a task may do without is there when its own name is given.
    """
    nested: dict[str, Any] = {}
    for group in groups():
        if group.optional and not fields.get(group.name):
            continue
        into = nested.setdefault(group.name, {}) if group.name else nested
        texts = {setting.name.rpartition(".")[2]: fields.get(setting.name, "").strip() for setting in group.settings}
        into |= {name: text for name, text in texts.items() if text}
    if wrong := complaints(TaskSettings, nested, text=True):
        return None, wrong
    sentences = [*_misfits_within_parts(nested)]
    try:
        if not sentences:
            return build(TaskSettings, nested, text=True), {}
    except InvalidTask as error:
        sentences += error.sentences
    told: dict[str, str] = {}
    for sentence in sentences:
        told.setdefault(field_of(sentence), sentence)
    return None, told


def _misfits_within_parts(nested: Mapping[str, Any]) -> Iterator[str]:
    """What settings of one part, such as `clear`, have against each other: a sentence for each part."""
    for name, given in nested.items():
        try:
            build_one(TaskSettings, name, given, text=True)
        except InvalidTask as error:
            yield from error.sentences


def field_of(sentence: str) -> str:
    """The name of the setting that an error begins with, such as `secagg.bits`; "" where it begins with none."""
    found = re.match(r"(?:(\w+): )?(\w+)", sentence)
    if found is None:
        return ""
    names = [one.name for group in groups() for one in group.settings] + [
        one.name for one in groups()[1:] if one.optional
    ]
    exact = ".".join(filter(None, found.groups()))
    return exact if exact in names else next((name for name in names if name.endswith(f".{found[2]}")), "")


def _those(settings: Iterable[Setting], *, of_devices: bool) -> tuple[Setting, ...]:
    return tuple(one for one in settings if (one.name in _OF_DEVICES) is of_devices)


def _within(part: str, setting: Setting) -> Setting:
    return dataclasses.replace(setting, name=f"{part}.{setting.name}")


_MANIFEST, _RELEASE = decoder(Manifest), decoder(Signed)
_CSRF_HEADER = "X-CSRF-Token"


class NewTaskForm(rendering.Endpoints):
    """The endpoints of the form."""

    def form(self, request: Request, clone: str = "") -> Response:
        """The form, with every setting, its meaning and its default. clone: a task whose values fill it in."""
        visitor = self._sessions.visitor(request)
        if visitor.token is None or not visitor.operates:
            return self._refuse(request, visitor)
        try:
            fields = self._fields_of(self._store(visitor.token), clone) if clone else {}
            return self._show(request, visitor, 200, fields, {})
        except UnknownTask as error:
            return self._show(request, visitor, rendering.status_of(error), {}, {"": str(error)})

    def matching(self, request: Request, population: str = "", where: str = "", goal: str = "") -> Response:
        """How many devices match the target in the form, and what should worry its operator, as a part of the page."""
        visitor = self._sessions.visitor(request)
        if visitor.token is None or not visitor.operates:
            return self._refuse(request, visitor)
        try:
            found = matching(self._service, visitor.token, population.strip(), where.strip())
        except InvalidTask as error:
            return self._renderer.page(request, visitor, "matching.html", found=None, concerns=error.sentences)
        concerns = found.concerns(int(goal) if goal.isdecimal() else 1)
        return self._renderer.page(request, visitor, "matching.html", found=found, concerns=concerns)

    async def upload(self, request: Request, sha256: str) -> Response:
        """Store a blob of a bundle, for an operator's page.

        Raises BadToken, RoleLacking, ForgedForm or WrongBody.
        """
        token = await run_in_threadpool(self._operator, request)
        data, digest = await read_hashed(request, self._service.settings.upload_limit_bytes)
        if digest.hex() != sha256:
            raise WrongBody(f"{sha256[:12]}… is not the SHA-256 of that file: the bundle is damaged")
        await run_in_threadpool(self._store(token).upload, data)
        return Response(status_code=204, headers=rendering.HEADERS)

    async def create(self, request: Request) -> Response:
        """Create the task, or show the form again with what is wrong. A form of others than operators is not read."""
        visitor = await run_in_threadpool(self._sessions.visitor, request)
        if visitor.token is None or not visitor.operates:
            return self._refuse(request, visitor)
        try:
            fields = await rendering.read_fields(request, self._service.settings.message_limit_bytes)
        except TooLarge as error:
            return self._show(request, visitor, rendering.status_of(error), {}, {"": str(error)})
        return await run_in_threadpool(self._create, request, visitor, visitor.token, fields)

    def _create(
        self, request: Request, visitor: rendering.Visitor, operator: Token, fields: dict[str, str]
    ) -> Response:
        try:
            self._sessions.check_form(visitor, fields)
            new = _new_task(fields)
            if not isinstance(new, NewTask):
                return self._show(request, visitor, 422, fields, new)
            new = _evaluated(self._store(operator), new, fields.get("clone"))
            task = create_task(self._service, new, operator)
        except rendering.SHOWN as error:
            where = "manifest" if isinstance(error, UnknownBlob) else field_of(str(error))
            return self._show(request, visitor, rendering.status_of(error), fields, {where: str(error)})
        return rendering.redirect(rendering.page_of(task.id))

    def _fields_of(self, store: CoordinatorStore, task_id: str) -> dict[str, str]:
        """The fields of the form with which a task like this one is created."""
        task = store.task(task_id)
        fields = {
            "clone": task_id,
            "name": task.name,
            "manifest": msgspec.json.encode(store.manifest(task_id)).decode(),
        }
        if task.release is not None:
            fields["release"] = msgspec.json.encode(task.release).decode()
        return fields | values(as_asked(task.settings))

    def _refuse(self, request: Request, visitor: rendering.Visitor) -> Response:
        status = 403 if visitor.token else 401
        return self._renderer.login(request, visitor, status, "Only an operator creates tasks.")

    def _show(
        self,
        request: Request,
        visitor: rendering.Visitor,
        status: int,
        given: Mapping[str, str],
        wrong: Mapping[str, str],
    ) -> Response:
        """The form with the values in `given`. wrong: sentences by the field that they are about, "" for none."""
        first = [one for one in groups()[0].settings if one.required]
        seen = {"first": first, "folds": folds(), "given": given, "wrong": wrong}
        return self._renderer.page(request, visitor, "new.html", status, **seen)

    def _operator(self, request: Request) -> Token:
        visitor = self._sessions.visitor(request)
        if visitor.token is None:
            raise BadToken("log in first")
        self._sessions.check_form(visitor, {rendering.CSRF_FIELD: request.headers.get(_CSRF_HEADER, "")})
        visitor.token.demand(Role.OPERATOR)
        return visitor.token


def _evaluated(store: CoordinatorStore, new: NewTask, clone: str | None) -> NewTask:
    """A task with what it evaluates, and how its models are: as of the task that it clones, on the same bundle."""
    if not clone or new.manifest != store.manifest(clone):
        return new
    task = store.task(clone)
    return replace(new, evaluates=task.evaluates, evaluation=task.evaluation)


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
