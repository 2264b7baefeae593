"""The client of the admin API: a coordinator's tasks, with the methods and the errors of the store itself."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import quote

import httpx2
import msgspec

from coordinator.api.http import ADMIN_ERRORS
from coordinator.errors import BadToken
from coordinator.operations import OPERATIONS, PREFIX, AdminService, NewTask, TaskStore
from coordinator.rules.entities import Evaluates, RegularEvaluation, Regularly, Task
from coordinator.rules.task_settings import TaskSettings
from fedcore.bundle import Bundle, Manifest
from fedcore.errors import WireError
from fedcore.release import Signed
from fedcore.validation import decoder
from fedcore.wire.messages import decode_problem
from ingress.limits import past_proxies

P = ParamSpec("P")
T = TypeVar("T")
_TIMEOUT_S = 60.0
LAST_PORT = 65535


class RemoteError(Exception):
    """The coordinator cannot be reached, or refused for a reason that the store does not know."""


_ANSWERS = {each.call: decoder(each.answer) for each in OPERATIONS if each.answer not in (bytes, type(None))}


def _call(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[RemoteStore, P], T]:
    """The method that asks the coordinator for an operation: it takes and gives what the operation's own does."""
    (operation,) = (operation for operation in OPERATIONS if operation.call is method)
    parameters, signature = operation.parameters, inspect.signature(method)
    answer: msgspec.json.Decoder[T] | None = _ANSWERS.get(method)

    def call(self: RemoteStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        arguments = signature.bind(self, *args, **kwargs).arguments
        parts = {
            name: arguments[parameter.name]
            for name, parameter in parameters.items()
            if arguments.get(parameter.name) is not None
        }
        asked = {name: value for name, value in parts.items() if f"{{{name}}}" not in operation.path}
        query = {name: str(value).lower() if isinstance(value, bool) else value for name, value in asked.items()}
        path = operation.path.format(**{name: quote(str(value), safe="") for name, value in parts.items()})
        body = list(arguments.values())[-1] if operation.takes else None
        content = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        response = self._ask(operation.method, path, params=query, content=content)
        if answer is None:
            return cast("T", response.content or None)
        try:
            return answer.decode(response.content)
        except msgspec.MsgspecError as error:
            raise RemoteError(
                f"{shown(response.url)} gave an answer that this version does not expect: {error}"
            ) from error

    functools.update_wrapper(call, method)
    return call


class RemoteStore(AbstractContextManager["RemoteStore"]):
    """The tasks of the coordinator whose admin API is at `url`, for the holder of `token`.

    Every method raises RemoteError, BadToken or RoleLacking, and the errors of the store's method of the same name.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._shown, self._has_token = shown(url), bool(token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        base = _base(url)
        self._client = httpx2.Client(base_url=base, headers=headers, timeout=_TIMEOUT_S, mounts=past_proxies(str(base)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    lineage = _call(TaskStore.lineage)
    releases = _call(TaskStore.releases)
    tasks = _call(TaskStore.tasks)
    task = _call(TaskStore.task)
    manifest = _call(TaskStore.manifest)
    progress = _call(TaskStore.progress)
    progress_of = _call(TaskStore.progress_of)
    rounds = _call(TaskStore.rounds)
    evaluations = _call(TaskStore.evaluations)
    spent = _call(TaskStore.spent)
    sessions = _call(TaskStore.sessions)
    history = _call(TaskStore.history)
    model = _call(TaskStore.model)
    answer = _call(TaskStore.answer)
    plan_part = _call(TaskStore.plan_part)
    certificate = _call(TaskStore.certificate)
    models = _call(TaskStore.models)
    model_versions = _call(TaskStore.model_versions)
    model_history = _call(TaskStore.model_history)
    model_counts = _call(TaskStore.model_counts)
    release_model = _call(TaskStore.release_model)
    promote_model = _call(TaskStore.promote_model)
    roll_back_model = _call(TaskStore.roll_back_model)
    devices = _call(TaskStore.devices)
    audit = _call(TaskStore.audit)
    alerts = _call(TaskStore.alerts)
    pause = _call(TaskStore.pause)
    resume = _call(TaskStore.resume)
    cancel = _call(TaskStore.cancel)
    roll_back = _call(TaskStore.roll_back)
    budget = _call(TaskStore.budget)
    set_budget = _call(TaskStore.set_budget)
    remove_budget = _call(TaskStore.remove_budget)
    revoke_device = _call(TaskStore.revoke_device)
    allow_device = _call(TaskStore.allow_device)
    matching = _call(AdminService.matching)
    security = _call(AdminService.security)
    test_alerts = _call(AdminService.test_alerts)
    upload = _call(AdminService.upload)
    create = _call(AdminService.create)

    def present(self, sha256: str) -> bool:
        """Whether a blob need not be uploaded."""
        return self._request("HEAD", f"/blobs/{sha256}").is_success

    def register_task(
        self,
        bundle: Bundle | Manifest,
        settings: TaskSettings,
        release: Signed | None = None,
        *,
        name: str | None = None,
        evaluation: Evaluates | Regularly | RegularEvaluation | None = None,
    ) -> Task:
        """Upload the blobs of bundles that the coordinator lacks, and start a task. As of `TaskStore`."""
        local = [evaluation.bundle if isinstance(evaluation, Regularly) else None, bundle]
        for ref, data in (blob for one in local if isinstance(one, Bundle) for blob in one.blobs()):
            if not self.present(ref.sha256):
                self.upload(ref.sha256, data)
        manifest = bundle.manifest if isinstance(bundle, Bundle) else bundle
        regular = evaluation.stored if isinstance(evaluation, Regularly) else evaluation
        evaluates, regular = (regular, None) if isinstance(regular, Evaluates) else (None, regular)
        return self.create(NewTask(manifest, settings, release, name, evaluates, regular))

    def _ask(self, method: str, path: str, **more: Any) -> httpx2.Response:
        response = self._request(method, path, **more)
        if response.is_success:
            return response
        try:
            problem = decode_problem(response.content)
        except WireError:
            problem = None
        if response.status_code == httpx2.codes.NOT_FOUND and (problem is None or problem.slug == "unknown-resource"):
            raise RemoteError(f"{shown(response.url)} has no admin API (404); use the operators' port, 8081 by default")
        if problem is None:
            raise RemoteError(f"{shown(response.url)} answered {response.status_code} {response.reason_phrase}")
        if problem.slug == "bad-token" and not self._has_token:
            raise BadToken(
                f"{self._shown} asks for a token, and MUSTER_TOKEN holds none: `muster coordinator token` makes one, "
                "where the coordinator's database is"
            )
        if problem.slug in ADMIN_ERRORS:
            raise ADMIN_ERRORS[problem.slug](problem.detail)
        raise RemoteError(f"{response.status_code} {problem.slug}: {problem.detail}")

    def _request(self, method: str, path: str, **more: Any) -> httpx2.Response:
        try:
            return self._client.request(method, path, **more)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RemoteError(f"{self._shown} cannot be reached: {_obstacle(error)}") from error


def _base(url: str) -> httpx2.URL:
    """The base of the admin API's addresses. Raises RemoteError."""
    try:
        base: httpx2.URL | None = httpx2.URL(url.rstrip("/") + PREFIX)
    except httpx2.InvalidURL:
        base = None
    whole = base is not None and base.scheme in ("http", "https") and bool(base.host)
    if base is None or not whole or (base.port is not None and not 0 < base.port <= LAST_PORT):
        # Without the words of the library, which may repeat a part of the password.
        raise RemoteError(
            f"{shown(url)} is no coordinator's URL: it has http:// or https://, a host, and after a colon a port from "
            f"1 to {LAST_PORT}, as http://127.0.0.1:8081 does"
        )
    return base


def _obstacle(error: Exception) -> str:
    """What keeps a request from a coordinator, in words; and what to do where nothing listens."""
    root: BaseException = error
    while root.__context__ is not None:
        root = root.__context__
    words = str(getattr(root, "strerror", None) or error)
    if isinstance(root, ConnectionRefusedError):
        return f"{words}; start the coordinator there, or name its port for operators, which its log has"
    return words


def shown(url: httpx2.URL | str) -> str:
    """An address as messages show it: without the user and the password that may be in it, also if it has no scheme."""
    return re.sub(r"^(\w+://)?.*@", r"\1", str(url))
