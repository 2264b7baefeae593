"""The client of the admin API: a coordinator's tasks, with the methods and the errors of the store itself."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from coordinator.api.admin.problems import ADMIN_ERRORS
from coordinator.api.admin.routes import PREFIX, LineageKey
from coordinator.api.admin.task_creation import NewTask
from coordinator.errors import BadToken
from coordinator.rules.audit import AuditEntry
from coordinator.rules.entities import Device, RoundRecord, SessionShape, Spent, Task, Transition
from coordinator.rules.progress import Progress
from coordinator.rules.task_settings import TaskSettings
from coordinator.security import Assumption
from fedcore.bundle import Bundle
from fedcore.decoding import decoder
from fedcore.errors import WireError
from fedcore.privacy.certificate import CertifiedLedger
from fedcore.release import Signed
from fedcore.wire.problems import decode_problem

T = TypeVar("T")
_TIMEOUT_S = 60.0
LAST_PORT = 65535
_LINEAGE, _RELEASES = decoder(LineageKey), decoder(list[Signed])
_TASK, _TASKS = decoder(Task), decoder(list[Task])
_PROGRESS, _PROGRESSES = decoder(Progress), decoder(list[Progress])
_CERTIFIED, _SPENT = decoder(CertifiedLedger), decoder(list[Spent])
_ASSUMPTIONS = decoder(list[Assumption])
_DEVICE, _DEVICES, _ENTRIES = decoder(Device), decoder(list[Device]), decoder(list[AuditEntry])
_ROUNDS, _SESSIONS, _HISTORY = decoder(list[RoundRecord]), decoder(list[SessionShape]), decoder(list[Transition])


class RemoteError(Exception):
    """The coordinator cannot be reached, or refused for a reason that the store does not know."""


class RemoteStore(AbstractContextManager["RemoteStore"]):
    """The tasks of the coordinator whose admin API is at `url`, for the holder of `token`.

    Every method raises RemoteError, BadToken or RoleLacking, and the errors of the store's method of the same name.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._shown, self._has_token = shown(url), bool(token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx2.Client(base_url=_base(url), headers=headers, timeout=_TIMEOUT_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    @property
    def lineage(self) -> str:
        """The public key with which the coordinator signs checkpoints."""
        return self._as(_LINEAGE, "GET", "/lineage").lineage

    def security(self) -> list[Assumption]:
        """Which assumptions on the coordinator hold, judged by itself."""
        return self._as(_ASSUMPTIONS, "GET", "/security")

    def releases(self) -> list[Signed]:
        """The log of releases: every one that devices of secure rounds were ever shown, in order."""
        return self._as(_RELEASES, "GET", "/releases")

    def register_task(
        self, bundle: Bundle, settings: TaskSettings, release: Signed | None = None, *, name: str | None = None
    ) -> Task:
        """Upload the blobs of a bundle that the coordinator lacks, and start a task on it."""
        for ref, data in bundle.blobs():
            path = f"/blobs/{ref.sha256}"
            if not self._client_request("HEAD", path).is_success:
                self._ask("PUT", path, content=data)
        new = NewTask(bundle.manifest, settings, release, name)
        return self._as(_TASK, "POST", "/tasks", content=msgspec.json.encode(new))

    def tasks(self) -> list[Task]:
        """Every task, oldest first."""
        return self._as(_TASKS, "GET", "/tasks")

    def task(self, task_id: str) -> Task:
        """One task."""
        return self._as(_TASK, "GET", f"/tasks/{_quoted(task_id)}")

    def progress(self, *task_ids: str) -> list[Progress]:
        """Why tasks are where they are: these, or every one, oldest first."""
        paths = [f"/tasks/{_quoted(task_id)}/progress" for task_id in task_ids]
        return [self._as(_PROGRESS, "GET", path) for path in paths] or self._as(_PROGRESSES, "GET", "/progress")

    def rounds(self, task_id: str) -> list[RoundRecord]:
        """Every attempt at every round, in order."""
        return self._as(_ROUNDS, "GET", f"/tasks/{_quoted(task_id)}/rounds")

    def spent(self, task_id: str) -> list[Spent]:
        """What a task had spent of its privacy budget after each of its private rounds, in order."""
        return self._as(_SPENT, "GET", f"/tasks/{_quoted(task_id)}/spent")

    def sessions(self, task_id: str) -> list[SessionShape]:
        """Counts of sessions by their steps: those of the task, and those of its population that got no task."""
        return self._as(_SESSIONS, "GET", f"/tasks/{_quoted(task_id)}/sessions")

    def history(self, task_id: str) -> list[Transition]:
        """Every change of a task's state, in order, with its cause."""
        return self._as(_HISTORY, "GET", f"/tasks/{_quoted(task_id)}/history")

    def model(self, task_id: str, number: int | None = None) -> bytes:
        """The model after a round, as named tensors in safetensors' format."""
        return self._ask("GET", f"/tasks/{_quoted(task_id)}/model", params=_after(number)).content

    def certificate(self, task_id: str, number: int | None = None) -> CertifiedLedger:
        """The privacy certificate of that model, with the ledger that it is about. Raises NotPrivate too."""
        return self._as(_CERTIFIED, "GET", f"/tasks/{_quoted(task_id)}/certificate", params=_after(number))

    def pause(self, task_id: str) -> None:
        """Open no new round; the running one finishes."""
        self._ask("POST", f"/tasks/{_quoted(task_id)}:pause")

    def resume(self, task_id: str) -> None:
        """Undo `pause`."""
        self._ask("POST", f"/tasks/{_quoted(task_id)}:resume")

    def cancel(self, task_id: str) -> None:
        """End the task and abandon its running round."""
        self._ask("POST", f"/tasks/{_quoted(task_id)}:cancel")

    def roll_back(self, task_id: str, number: int) -> None:
        """Let a paused task go on from the model after round `number`; 0 is the start."""
        self._ask("POST", f"/tasks/{_quoted(task_id)}:rollback", params={"round": str(number)})

    def devices(self, limit: int = 100, *, revoked: bool = False) -> list[Device]:
        """The devices that enrolled last, the newest first; or those that were revoked, the last one first."""
        query = {"limit": str(limit), "revoked": str(revoked).lower()}
        return self._as(_DEVICES, "GET", "/devices", params=query)

    def revoke_device(self, device_id: str) -> Device:
        """Refuse a device from now on; again is the same as once."""
        return self._as(_DEVICE, "POST", f"/devices/{_quoted(device_id)}:revoke")

    def allow_device(self, device_id: str) -> Device:
        """Take a revoked device back; again is the same as once."""
        return self._as(_DEVICE, "POST", f"/devices/{_quoted(device_id)}:allow")

    def audit(self, after: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """The first entries of the audit log after that number, or the last ones; in order, a thousand at most."""
        query = {"limit": str(limit)} | ({} if after is None else {"after": str(after)})
        return self._as(_ENTRIES, "GET", "/audit", params=query)

    def _as(self, kind: msgspec.json.Decoder[T], method: str, path: str, **more: Any) -> T:
        response = self._ask(method, path, **more)
        try:
            return kind.decode(response.content)
        except msgspec.MsgspecError as error:
            raise RemoteError(
                f"{shown(response.url)} answered something else than this version expects: {error}"
            ) from error

    def _ask(self, method: str, path: str, **more: Any) -> httpx2.Response:
        response = self._client_request(method, path, **more)
        if response.is_success:
            return response
        try:
            problem = decode_problem(response.content)
        except WireError:
            problem = None
        if response.status_code == httpx2.codes.NOT_FOUND and (problem is None or problem.slug == "unknown-resource"):
            raise RemoteError(f"{shown(response.url)} is no address of an admin API (404); name the port for operators")
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

    def _client_request(self, method: str, path: str, **more: Any) -> httpx2.Response:
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


def _after(number: int | None) -> dict[str, str]:
    """The query for what there is after a round; None is the last one."""
    return {} if number is None else {"round": str(number)}


def _quoted(name: str) -> str:
    return quote(name, safe="")
