"""Rows as values: tasks, rounds, assignments and devices as the store has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec

from coordinator.errors import InvalidTask, RoleLacking, demand
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.rules.task_settings import MOST_COUNT, TaskSettings
from fedcore.bundle import AlgorithmRef, Bundle, Manifest
from fedcore.plan import BlobRef, PlanSignature
from fedcore.release import Signed
from fedcore.validation import Digest

NOT_BOTH = "a task evaluates a model that is there, or has its own evaluated while it trains: not both"
LONGEST_NAME = 100
"""The most characters of a task's name."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The model after round `number`: server state and broadcast, by digest. Number 0 is the start.

    lineage: the signed entry that says where the broadcast comes from, in a task with a release.
    """

    number: int
    state_sha256: str
    checkpoint_sha256: str
    lineage: Signed | None = None

    @property
    def blobs(self) -> tuple[tuple[str, bool], ...]:
        """Both digests, each with whether devices may have the blob."""
        return (self.state_sha256, False), (self.checkpoint_sha256, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that enrolled. `key` is its public key as text, `attestation` the kind of its evidence.

    revoked_at: since when an operator refuses it, in seconds since 1970; None for one that may sign requests.
    """

    id: str
    key: str
    attestation: str
    enrolled_at: float
    revoked_at: float | None


class ModelSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a model came from: a task, after a round, or a file, by its SHA-256."""

    task: str | None = None
    round: int | None = None
    file: Digest | None = None

    def __post_init__(self) -> None:
        if (self.task is None) == (self.file is None) or (self.task is None) != (self.round is None):
            raise ValueError("a model comes from a round of a task, or from a file")

    @property
    def words(self) -> str:
        """The source in words."""
        return f"file {self.file}" if self.task is None else f"task {self.task}, round {self.round}"


class Evaluates(msgspec.Struct, frozen=True, omit_defaults=True):
    """The origin of the model that a task evaluates, and of the one with which it is compared, if any.

    lineage: the signed entry that names the model, where the training's release covers the evaluation.
    """

    model: ModelSource
    against: ModelSource | None = None
    lineage: Signed | None = None

    @property
    def words(self) -> str:
        """The origins in words."""
        return self.model.words + ("" if self.against is None else f", against {self.against.words}")


class RegularEvaluation(msgspec.Struct, frozen=True):
    """The evaluation of a training task after every so many committed rounds, by the plan of a bundle of its own."""

    every: Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
    bundle: Manifest

    def due(self, number: int) -> bool:
        """Whether the model after committed round `number` is evaluated."""
        return number % self.every == 0


class Regularly(NamedTuple):
    """A regular evaluation, as it is asked for: after every so many committed rounds, by a bundle that evaluates."""

    every: int
    bundle: Bundle

    @classmethod
    def asked(cls, every: int | None, bundle: Bundle | None) -> Regularly | None:
        """The evaluation that was asked for; None where none was. Raises InvalidTask for a half of one."""
        if every is None and bundle is None:
            return None
        if every is None or bundle is None:
            raise InvalidTask("evaluate_every, a number of rounds, goes with evaluation, a bundle that evaluates")
        demand(1 <= every <= MOST_COUNT, "evaluate_every", f"a whole number from 1 to {MOST_COUNT}", every)
        return cls(every, bundle)

    @property
    def stored(self) -> RegularEvaluation:
        """What a task keeps of it."""
        return RegularEvaluation(self.every, self.bundle.manifest)


class Measured(msgspec.Struct, frozen=True):
    """An evaluation of a task's model: after which round, by which task, and that task's newest metrics, if any yet."""

    round: int
    task: str
    algorithm: str
    state: TaskState
    metrics: dict[str, float]

    @property
    def means(self) -> dict[str, float]:
        """The figures without their intervals and percentiles."""
        own = f"{self.algorithm}."
        return {name: value for name, value in self.metrics.items() if name.startswith(own) and name.count(".") == 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task; `initial` is where it started from, `certificate_sha256` the blob of its bundle's certificate.

    name: what people call it; others may have the same. bundle: the name of its bundle. evaluates: the origin of the
    model that it evaluates, where its creator said one. evaluation: of its own models, while it trains.
    """

    id: str
    name: str
    bundle: str
    state: TaskState
    reason: str
    settings: TaskSettings
    algorithm: AlgorithmRef
    plan_sha256: str
    plan_signature: PlanSignature | None
    certificate_sha256: str
    release: Signed | None
    initial: Snapshot
    created_at: float
    evaluates: Evaluates | None = None
    evaluation: RegularEvaluation | None = None

    @property
    def named(self) -> str:
        """Its id and its name, for a line of the log."""
        return f"{self.id} {self.name!r}"


def check_name(name: str) -> str:
    """The name, if people may call a task by it. Several tasks may have one. Raises InvalidTask."""
    fits = 0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()
    wording = f"1 to {LONGEST_NAME} printable characters, no space first or last"
    demand(fits, "the name of a task", wording, name)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One attempt at a round. `seconds` and `checkpoint_sha256` are None while, or because, there are none.

    abort_reasons: how many devices gave up, by reason. The counts and `staleness` are those of `rules.rounds.Round`.
    """

    id: int
    number: int
    attempt: int
    state: RoundState
    reason: str
    assigned: int
    reported: int
    aborted: int
    lost: int
    expired: int
    stale: int
    taken_over: int
    handed_on: int
    staleness: tuple[int, ...]
    abort_reasons: dict[str, int]
    metrics: dict[str, float]
    opened_at: float
    seconds: float | None
    checkpoint_sha256: str | None

    @property
    def not_needed(self) -> int:
        """Devices of a round that is over whose report it did without."""
        begun = self.taken_over + self.assigned
        ended = self.reported + self.aborted + self.lost + self.expired + self.stale
        return begun - ended - self.handed_on if self.state.ended else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRound(RoundRecord):
    """A round that has not ended, of a `task`; `entered_at` is when it came into its state, in seconds since 1970."""

    task: str
    entered_at: float

    @property
    def at_work(self) -> int:
        """Devices that may still report."""
        return self.taken_over + self.assigned - self.reported - self.aborted - self.lost - self.expired


class AssignmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One device's part in a round; `report_sha256` is None until its report was counted."""

    id: str
    round: int
    task: str
    number: int
    slot: int
    device: str
    state: AssignmentState
    reason: str
    plan_sha256: str
    report_sha256: str | None


@dataclass(frozen=True, slots=True)
class SessionShape:
    """How many sessions had this shape; `task` is empty for those that were never assigned to one."""

    task: str
    shape: str
    count: int

    @property
    def steps(self) -> list[str]:
        """The steps of such a session, in order."""
        return self.shape.split(" > ")


@dataclass(frozen=True, slots=True)
class AssignedDevice:
    """A device that was drawn for a round: the id and slot of its assignment, and its own id."""

    id: str
    slot: int
    device: str


@dataclass(frozen=True, slots=True)
class Spent:
    """What a task had spent of its privacy budget after a round: ε at the task's δ."""

    number: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class NoiseSource:
    """What the noise of a private round is made of: a nonce, and the private key of `signer`, which is in a file."""

    nonce: bytes
    signer: str


@dataclass(frozen=True, slots=True)
class SealedBlob:
    """A blob whose bytes are stored sealed: its reference, the sealed bytes' reference, and the key that opens them."""

    ref: BlobRef
    sealed: BlobRef
    key: bytes


class Role(StrEnum):
    """The rights of a token, the least first: to scrape metrics, also to look, also to create and change tasks."""

    METRICS = "metrics"
    VIEWER = "viewer"
    OPERATOR = "operator"

    def includes(self, other: Role) -> bool:
        """Whether this role may do all that `other` may."""
        return [*Role].index(self) >= [*Role].index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as it is kept. `name` says whose it is, in every change made with it; times in seconds since 1970.

    populations: those that it is limited to; None for every one, and what belongs to none. proxy: whether a proxy sends
    it, for a `person` whom each request names.
    """

    id: str
    name: str
    role: Role
    created_at: float
    expires_at: float
    revoked_at: float | None = None
    populations: tuple[str, ...] | None = None
    proxy: bool = False
    person: str = ""

    def state(self, at: float) -> str:
        """Whether it is good, revoked or expired at a time, in seconds since 1970."""
        if self.revoked_at is not None:
            return "revoked"
        return "good" if at < self.expires_at else "expired"

    @property
    def signature(self) -> str:
        """The name of the token's user in the history."""
        return f"{self.role} {self.name}, token {self.id}" + (f", for {self.person}" if self.person else "")

    @property
    def kept(self) -> dict[str, Any]:
        """All of it but the person, who is of one request."""
        return {name: value for name, value in asdict(self).items() if name != "person"}

    @property
    def rights(self) -> str:
        """Its role, whose it is, and to what it is limited."""
        limits = "" if self.populations is None else f", of {self.of}"
        return f"{self.role} {self.name}" + (", a proxy" if self.proxy else "") + limits

    @property
    def of(self) -> str:
        """The populations to which it is limited."""
        return "every one" if self.populations is None else ", ".join(self.populations)

    def demand(self, role: Role) -> None:
        """Raises RoleLacking."""
        if not self.role.includes(role):
            raise RoleLacking(f"this asks for the role {role}; the token {self.id} of {self.name} has {self.role}")

    def demand_unlimited(self) -> None:
        """Raises RoleLacking."""
        if self.populations is not None:
            raise RoleLacking(
                f"this is about the whole coordinator; the token {self.id} of {self.name} is limited to {self.of}"
            )


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of state: from which to which, by which cause, when (seconds since 1970)."""

    before: str
    after: str
    cause: str
    at: float
