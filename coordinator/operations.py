"""Operations of the admin API: one table, from which its routes, permissions, document and client are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, get_type_hints

import msgspec

from coordinator.rules import entities
from coordinator.rules.alerts import Alert, Assumption, AuditEntry
from coordinator.rules.budget import BudgetReport
from coordinator.rules.kinds import TaskAnswer
from coordinator.rules.progress import Progress
from coordinator.rules.roll_outs import Model, ModelCount, ModelVersion, RollOut
from coordinator.rules.selection import Matching
from coordinator.rules.task_settings import TaskSettings
from fedcore.bundle import Bundle, Manifest
from fedcore.privacy.settings import CertifiedLedger
from fedcore.release import Signed

PREFIX = "/admin/v1"
_WIRE_NAMES = {"task_id": "task", "device_id": "device", "number": "round"}
"""Names of methods' parameters in paths and queries, where they differ."""


class LineageKey(msgspec.Struct, frozen=True):
    """The public key with which the coordinator signs checkpoints, as a release must name it."""

    lineage: str


class NewTask(msgspec.Struct, frozen=True):
    """`POST /admin/v1/tasks`: a bundle, whose blobs were uploaded before, the settings of its task, release and name.

    A task with secure aggregation needs a release, signed for the bundle and the settings. name: for people, by default
    that of the bundle. evaluates: the origin of the models from which the bundle starts, of a task that evaluates them.
    evaluation: of the task's own models, while it trains; blobs of its bundle were uploaded too.
    """

    manifest: Manifest
    settings: TaskSettings
    release: Signed | None = None
    name: str | None = None
    evaluates: entities.Evaluates | None = None
    evaluation: entities.RegularEvaluation | None = None


class TrainedTasks(Protocol):
    """Tasks that another may begin at. Methods raise UnknownTask."""

    def task(self, task_id: str) -> entities.Task:
        """One task."""

    def rounds(self, task_id: str) -> list[entities.RoundRecord]:
        """Every attempt at every round, in order."""

    def plan_part(self, task_id: str, part: str | None = None) -> bytes:
        """The plan of a task, or what apps predict with beside the model: a predict graph or the frozen vectors.

        part: the SHA-256 of a blob that the plan names for that, by default the plan itself. Raises UnknownBlob.
        """


class TaskStore(TrainedTasks, Protocol):
    """What operators do with a coordinator: on its store itself, or through its admin API.

    Methods that take a task's id raise UnknownTask. Through the API all raise BadToken, RoleLacking and RemoteError.
    """

    def lineage(self) -> LineageKey:
        """The public key with which the coordinator signs checkpoints; a release names it.

        On a store that knows none yet, the key is made. Raises KeysMissing, KeysDamaged or KeysDiffer.
        """

    def releases(self) -> list[Signed]:
        """The log of releases: every one that devices of secure rounds were ever shown, in order."""

    def register_task(
        self,
        bundle: Bundle | Manifest,
        settings: TaskSettings,
        release: Signed | None = None,
        *,
        name: str | None = None,
        evaluation: entities.Evaluates | entities.Regularly | entities.RegularEvaluation | None = None,
    ) -> entities.Task:
        """Copy a bundle into the store, or take one whose blobs are there by its manifest, and start a task on it.

        release: signed for this bundle and these settings; a task with secure aggregation needs one. name: for people;
        by default that of the bundle. evaluation: of a task that evaluates, the origin of the models from which its
        bundle starts, with which those of other tasks are compared. Of a task that trains, how often a task of one
        round begins that evaluates its model on the held-out devices, and by which bundle.

        Raises BudgetExceeded when the task would exceed the privacy budget of its population, or promises no privacy
        where there is one; InvalidTask when the name may not be, plan, algorithm, initial state and settings do not fit
        each other, a model is not from where `evaluation` says, or the plan does not pass the release check;
        UnknownTask and UnknownRound for an origin that is not there; UnknownBlob for a manifest's blob; fedcore's
        errors when a blob was altered, a signature is not good, or the algorithm or one of its settings is unknown;
        StoreConflict when collections take its blobs again and again.
        """

    def tasks(self) -> list[entities.Task]:
        """Every task, oldest first."""

    def manifest(self, task_id: str) -> Manifest:
        """The manifest of the bundle that a task runs, by which another task can begin as it did.

        Of what `muster export` wrote, the name of the model and words about compression are not kept.
        """

    def progress(self) -> list[Progress]:
        """Why each task is where it is, oldest first: a reason, and a sentence for people."""

    def progress_of(self, task_id: str) -> Progress:
        """Why a task is where it is: a reason, and a sentence for people."""

    def evaluations(self, task_id: str) -> list[entities.Measured]:
        """Every evaluation of the task's models, by round, then the oldest first."""

    def spent(self, task_id: str) -> list[entities.Spent]:
        """What the task had spent of its privacy budget after each of its private rounds, in order."""

    def sessions(self, task_id: str) -> list[entities.SessionShape]:
        """Counts of sessions by their steps, of the task, and of its population for sessions that got no task."""

    def history(self, task_id: str) -> list[entities.Transition]:
        """Every change of the task's state, in order, with its cause and time."""

    def model(self, task_id: str, number: int | None = None) -> bytes:
        """The model after a committed round, by default the last, as named tensors in safetensors' format.

        The audit log says who read it. Raises UnknownRound, and WrongKind for a task that asks a question.
        """

    def answer(self, task_id: str) -> TaskAnswer:
        """The answer to the question of a task, as far as its committed rounds have one.

        Groups of too few devices are hidden. The audit log says who read it. Raises WrongKind for a task that asks
        none, UnknownBlob while the answer of a private round is sealed, and fedcore's QuestionError for a column that
        cannot be computed.
        """

    def certificate(self, task_id: str, number: int | None = None) -> CertifiedLedger:
        """The privacy certificate of that model, of a task that promises privacy, with the ledger that it is about.

        The audit log says who read it. Raises UnknownRound, NotPrivate, and as `lineage`.
        """

    def models(self) -> list[Model]:
        """Every model that was released for apps, and what devices have of it now."""

    def model_versions(self, population: str, name: str) -> list[ModelVersion]:
        """The released versions of a model, in order. Raises UnknownModel."""

    def model_history(self, population: str, name: str) -> list[RollOut]:
        """Every roll-out of a model's versions, in order. Raises UnknownModel."""

    def model_counts(self, population: str, name: str) -> list[ModelCount]:
        """How many check-ins of the last 30 days stated which version of a model, by day. Raises UnknownModel."""

    def release_model(self, signed: Signed) -> ModelVersion:
        """Release the next version of a model, whose blobs are stored; no device has it before it is promoted.

        The blobs are the plan, its predict graphs and frozen vectors, and the parameters. Devices may fetch them from
        now on, and they are kept for ever.

        Raises InvalidModel for a number that is not the next, a counter below that of an earlier version of this
        signer, an expired release, an unknown population, a plan without a predict graph, and parameters that are not
        the plan's or not finite; UnknownBlob; and fedcore's errors when the signature or a blob is not good.
        """

    def promote_model(
        self, population: str, name: str, version: int, share: float, gate: str | None = None, *, where: str = ""
    ) -> RollOut:
        """Give a released version of a model to a share of the devices, from now on; 1 is all of them.

        where: of the devices whose labels match this target alone, when they ask.

        A greater share keeps the devices of a smaller one; those outside have the version that all had before. gate:
        `METRIC >= previous`, or `<=`: refuse a version whose evaluation is worse than that of the one that all have.

        Raises UnknownModel for a version that was not released; InvalidModel for a share that is none, for a target
        that does not parse, for a version that is earlier than the one which devices have, that all of them have, that
        has expired, whose counter is below that of one which devices saw, or which the gate refuses.
        """

    def roll_back_model(
        self, population: str, name: str, version: int | None = None, withdraw: bool = False
    ) -> RollOut:
        """Give all devices an earlier version of a model, by default the one that all had before.

        withdraw: where they had none, a roll-out to the share 0, after which no device is given any, and those that
        took the version keep it. Raises UnknownModel and InvalidModel as `promote_model`, and InvalidModel for a
        version that is not earlier, for a withdrawal where there is one, or that is not asked for, and where the model
        is withdrawn already.
        """

    def budget(self, population: str) -> BudgetReport:
        """The privacy budget of a population, and what its tasks have spent of it or still may, per device.

        Devices that enrol anew are outside it, as a new id is a new device. Raises UnknownPopulation where there is
        neither a task nor a budget, and PrivacyError without an accountant.
        """

    def set_budget(self, population: str, epsilon: float, delta: float, minimum_devices: int = 1) -> BudgetReport:
        """Set the privacy budget that all tasks of a population share, and the least devices of a group in answers.

        From now on tasks that would exceed it are refused, and questions that show groups of fewer devices.

        Raises InvalidBudget for values that cannot be, and for a budget below what the tasks may have spent.
        """

    def remove_budget(self, population: str) -> BudgetReport:
        """Remove the privacy budget of a population; what its tasks have spent stays counted. Raises as `budget`."""

    def devices(self, limit: int = 100, *, revoked: bool = False) -> list[entities.Device]:
        """The devices that enrolled last, the newest first; or those that were revoked, the last one first."""

    def audit(self, after: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """The first entries of the audit log after that number, or the last ones; in order, a thousand at most."""

    def alerts(self, limit: int = 100) -> list[Alert]:
        """Alerts: open ones, then those that were cleared, the newest first; a thousand at most.

        The first says so if no coordinator looks for alerts.
        """

    def pause(self, task_id: str) -> entities.Task:
        """Open no new round; the running one finishes. Raises TaskEnded unless the task is active."""

    def resume(self, task_id: str) -> entities.Task:
        """Undo `pause`. Raises TaskEnded unless the task is paused."""

    def cancel(self, task_id: str) -> entities.Task:
        """End the task and abandon its running round; what was committed stays. Raises TaskEnded when it is over."""

    def roll_back(self, task_id: str, number: int) -> entities.Task:
        """Let a paused task go on from the model after an earlier round; 0 is the start.

        The history keeps the rounds since, and a round without devices is committed after them, with that model, whose
        checkpoint is signed anew. Raises TaskEnded unless the task is paused and its last round has ended; UnknownRound
        when the model is not there, or the next round's trip cannot go on from it; KeysDiffer when the task's release
        names another lineage key; BudgetExceeded when the rounds that it gets again have no room in the budget of the
        population; and as `lineage`.
        """

    def revoke_device(self, device_id: str) -> entities.Device:
        """Refuse a device from now on; again is the same as once. Raises UnknownDeviceId."""

    def allow_device(self, device_id: str) -> entities.Device:
        """Take a revoked device back; again is the same as once. Raises UnknownDeviceId."""


class AdminService(Protocol):
    """Operations that the API has and a store has not: the parts of `TaskStore.register_task`, and a judgement."""

    def security(self) -> list[Assumption]:
        """Which assumptions on this coordinator hold, by its settings, its files and its store."""

    def matching(self, population: str, where: str = "") -> Matching:
        """How many of the devices that came to this process within a day match a target, by the labels that they told.

        Counts are rounded down to multiples of the population's `minimum_devices`. Raises InvalidTask for a target that
        does not parse.
        """

    def test_alerts(self) -> None:
        """Send the webhook of alerts one signed event that says it is a test. Raises WebhookFailed."""

    def present(self, sha256: str) -> None:
        """Whether a blob is stored already and a row knows it, so that it need not be uploaded. Raises UnknownBlob."""

    def upload(self, sha256: str, data: bytes) -> None:
        """Store a blob. It is not served until a task or a model names it; unnamed ones are removed in time."""

    def create(self, new: NewTask) -> entities.Task:
        """Start a task on a bundle whose blobs are stored."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation over HTTP: the least role that may do it, its method and path, and the method that it calls.

    call: of a protocol above; it says what goes in, what comes back, and the sentence. problems: beside those that
    follow from the rest. takes: the type of the body, that of the last parameter. whole: it is about the whole
    coordinator, so that a token which is limited to populations may not do it.
    """

    role: entities.Role
    method: str
    path: str
    call: Callable[..., Any]
    problems: tuple[str, ...] = ()
    takes: Any = None
    status: int = 200
    whole: bool = False

    @property
    def name(self) -> str:
        """The name of the method that it calls."""
        return self.call.__name__

    @property
    def sentence(self) -> str:
        """What it does, in one sentence."""
        return (inspect.getdoc(self.call) or "").partition("\n\n")[0].partition(" Raises ")[0]

    @property
    def answer(self) -> Any:
        """The type of its answer."""
        return get_type_hints(self.call)["return"]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What its path and query hold, by its name there; each with the name in the method, and its type."""
        hints = get_type_hints(self.call)
        parameters = [parameter for name, parameter in inspect.signature(self.call).parameters.items() if name in hints]
        asked = [parameter for parameter in parameters if self.takes is None or hints[parameter.name] is not self.takes]
        return {
            _WIRE_NAMES.get(parameter.name, parameter.name): parameter.replace(annotation=hints[parameter.name])
            for parameter in asked
        }


_MODEL = "/populations/{population}/models/{name}"
_BUDGET = "/populations/{population}/budget"
_VIEWER, _OPERATOR = entities.Role.VIEWER, entities.Role.OPERATOR
OPERATIONS = (
    Operation(_VIEWER, "GET", "/lineage", TaskStore.lineage),
    Operation(_VIEWER, "GET", "/releases", TaskStore.releases, whole=True),  # a proof is about all of them
    Operation(_VIEWER, "GET", "/tasks", TaskStore.tasks),
    Operation(_VIEWER, "GET", "/tasks/{task}", TaskStore.task),
    Operation(_VIEWER, "GET", "/tasks/{task}/manifest", TaskStore.manifest),
    Operation(_VIEWER, "GET", "/progress", TaskStore.progress),
    Operation(_VIEWER, "GET", "/tasks/{task}/progress", TaskStore.progress_of),
    Operation(_VIEWER, "GET", "/tasks/{task}/rounds", TaskStore.rounds),
    Operation(_VIEWER, "GET", "/tasks/{task}/evaluations", TaskStore.evaluations),
    Operation(_VIEWER, "GET", "/tasks/{task}/spent", TaskStore.spent),
    Operation(_VIEWER, "GET", "/tasks/{task}/sessions", TaskStore.sessions),
    Operation(_VIEWER, "GET", "/tasks/{task}/history", TaskStore.history),
    Operation(_VIEWER, "GET", _BUDGET, TaskStore.budget, ("unknown-population",)),
    Operation(_VIEWER, "GET", "/populations/{population}/matching", AdminService.matching, ("invalid-task",)),
    Operation(_VIEWER, "GET", "/devices", TaskStore.devices, whole=True),
    Operation(_VIEWER, "GET", "/audit", TaskStore.audit),
    Operation(_VIEWER, "GET", "/alerts", TaskStore.alerts),
    Operation(_VIEWER, "GET", "/tasks/{task}/model", TaskStore.model, ("unknown-round", "wrong-kind")),
    Operation(
        _VIEWER, "GET", "/tasks/{task}/answer", TaskStore.answer, ("wrong-kind", "unknown-blob", "invalid-bundle")
    ),
    Operation(_VIEWER, "GET", "/tasks/{task}/plan", TaskStore.plan_part, ("unknown-blob",)),
    Operation(_VIEWER, "GET", "/tasks/{task}/certificate", TaskStore.certificate, ("unknown-round", "not-private")),
    Operation(_VIEWER, "GET", "/models", TaskStore.models),
    Operation(_VIEWER, "GET", _MODEL + "/versions", TaskStore.model_versions),
    Operation(_VIEWER, "GET", _MODEL + "/history", TaskStore.model_history),
    Operation(_VIEWER, "GET", _MODEL + "/counts", TaskStore.model_counts),
    Operation(_OPERATOR, "GET", "/security", AdminService.security, whole=True),
    Operation(_OPERATOR, "POST", "/alerts:test", AdminService.test_alerts, ("webhook-failed",), status=204, whole=True),
    Operation(_OPERATOR, "PUT", "/blobs/{sha256}", AdminService.upload, ("digest-mismatch",), takes=bytes, status=204),
    Operation(_OPERATOR, "HEAD", "/blobs/{sha256}", AdminService.present, ("unknown-blob",), status=204),
    Operation(
        _OPERATOR,
        "POST",
        "/tasks",
        AdminService.create,
        (
            "malformed-message",
            "unknown-blob",
            "invalid-task",
            "budget-exceeded",
            "invalid-bundle",
            "unknown-task",
            "unknown-round",
        ),
        takes=NewTask,
        status=201,
    ),
    Operation(_OPERATOR, "POST", "/tasks/{task}:pause", TaskStore.pause, ("task-ended",)),
    Operation(_OPERATOR, "POST", "/tasks/{task}:resume", TaskStore.resume, ("task-ended",)),
    Operation(_OPERATOR, "POST", "/tasks/{task}:cancel", TaskStore.cancel, ("task-ended",)),
    Operation(
        _OPERATOR,
        "POST",
        "/tasks/{task}:rollback",
        TaskStore.roll_back,
        ("unknown-round", "task-ended", "keys-differ", "budget-exceeded"),
    ),
    Operation(_OPERATOR, "PUT", _BUDGET, TaskStore.set_budget, ("invalid-budget",)),
    Operation(_OPERATOR, "DELETE", _BUDGET, TaskStore.remove_budget, ("unknown-population",)),
    Operation(
        _OPERATOR,
        "POST",
        "/models",
        TaskStore.release_model,
        ("malformed-message", "unknown-blob", "invalid-model", "invalid-bundle"),
        takes=Signed,
        status=201,
    ),
    Operation(_OPERATOR, "POST", _MODEL + ":promote", TaskStore.promote_model, ("invalid-model",)),
    Operation(_OPERATOR, "POST", _MODEL + ":roll-back", TaskStore.roll_back_model, ("invalid-model",)),
    Operation(_OPERATOR, "POST", "/devices/{device}:revoke", TaskStore.revoke_device, whole=True),
    Operation(_OPERATOR, "POST", "/devices/{device}:allow", TaskStore.allow_device, whole=True),
)
"""Every operation of the admin API. Of devices nothing says which population they belong to."""
