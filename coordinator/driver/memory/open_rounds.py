"""Loaded tasks, ready to run, and their open rounds, as the driver has them in memory."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field

import msgspec
from msgspec import structs
from msgspec.structs import replace

from coordinator.driver.replica_membership import Membership
from coordinator.errors import KeysDiffer, Unavailable, UnknownBlob
from coordinator.rules import buffers, rounds as round_rules
from coordinator.rules.entities import Snapshot, Task
from coordinator.rules.release import OTHER_LINEAGE, obstacle
from coordinator.rules.replicas import may_share
from coordinator.rules.rounds import Abandon, Event, Revealed, Round, Stepped, Tick, Waiting
from coordinator.rules.selection import UNRELIABLE_ROUNDS, DeviceHoldOut, Needs
from coordinator.rules.states import LeftOut, RoundState, TaskState
from coordinator.rules.task_settings import TaskSettings
from coordinator.secure.round import SecureRound
from coordinator.store.records.records import Records
from coordinator.store.starting import start_of
from coordinator.store.tasks import CoordinatorStore
from fedcore.codecs import RoundKey
from fedcore.errors import AlgorithmError, FedcoreError, PrivacyError
from fedcore.plan import Plan
from fedcore.privacy.accounting import spent
from fedcore.wire.messages import Offer

# Loading of a task: its plan and algorithm, ready to run.


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A task as the store has it, with its plan and its needs of a device. waits: the time to start has not come."""

    record: Task
    plan: Plan
    needs: Needs
    waits: bool = False

    @classmethod
    def of(cls, record: Task, plan: Plan, at: float) -> LoadedTask:
        """The task with its plan. at: now, in seconds since 1970."""
        settings = record.settings
        needs = Needs(
            frozenset(plan.graphs),
            plan.examples.collection,
            settings.min_examples,
            settings.requires,
            _hold_out(settings),
            bool(plan.kept),
            settings.where,
        )
        return cls(record, plan, needs, at < start_of(settings))

    @property
    def id(self) -> str:
        """The task's id."""
        return self.record.id

    @property
    def settings(self) -> TaskSettings:
        """The task's settings."""
        return self.record.settings

    @property
    def population(self) -> str:
        """The population whose devices take part."""
        return self.settings.population

    @property
    def active(self) -> bool:
        """Whether new rounds may begin."""
        return self.record.state is TaskState.ACTIVE and not self.waits

    @property
    def offer(self) -> Offer:
        """The offer of the task to a device that checks in."""
        rules = structs.asdict(self.settings.on_device)
        if self.settings.on_device.max_example_age_s is not None:
            rules["min_recent_examples"] = rules.pop("min_examples")
        rules["min_examples"] = max(rules.get("min_examples", 0), self.needs.min_examples)
        return Offer(task=self.id, collection=self.needs.collection, **rules)

    def paused(self) -> LoadedTask:
        """The same task, opening no other round."""
        return dataclasses.replace(self, record=dataclasses.replace(self.record, state=TaskState.PAUSED))


def with_good_release(membership: Membership, record: Task, lineage: str, at: float) -> Task:
    """The task, paused by now if devices would refuse its release.

    lineage: the public key with which this coordinator signs checkpoints. at: now, in seconds since 1970.
    """
    if record.state is TaskState.ACTIVE and record.release is not None:
        words = obstacle(record.release, lineage, at)
        if words:
            return _pause(membership, record, "release-unusable", words)
    return record


def with_lineage_back(membership: Membership, record: Task, lineage: str, at: float) -> Task:
    """The task, made active if it was paused for another lineage key than this coordinator has now. As above."""
    if record.state is not TaskState.PAUSED or not record.reason.startswith(OTHER_LINEAGE):
        return record
    if (record.release and obstacle(record.release, lineage, at)) or _other_noise(membership.store, record, lineage):
        return record
    _LOG.warning("task %s goes on: its lineage key is back", record.named)
    with membership.writing() as records:
        records.move_task(record, TaskState.ACTIVE, "lineage-key-back")
    return dataclasses.replace(record, state=TaskState.ACTIVE, reason="")


def load_task(
    membership: Membership, record: Task, lineage: str, before: LoadedTask | None, at: float
) -> LoadedTask | None:
    """The task with its plan; None when its algorithm cannot be made, or a blob that it needs cannot be read.

    Or when its privacy cannot be accounted for. Then it is paused, and the others go on.

    lineage: the public key with which this coordinator signs checkpoints, and makes noise again.
    before: the task as it was loaded last. When it is new here, or was resumed, all that its next round needs is looked
    for. at: now, in seconds since 1970.
    """
    store = membership.store
    try:
        plan = store.plan(record.plan_sha256)
        if record.state is TaskState.ACTIVE and (before is None or before.record.state is not TaskState.ACTIVE):
            _look_for(store, record, lineage, plan)
        return LoadedTask.of(record, plan, at)
    except Unavailable:  # an object store that does not answer now
        return None
    except (AlgorithmError, PrivacyError, KeysDiffer) as error:
        if record.state is TaskState.ACTIVE:
            cause = "algorithm-unusable" if isinstance(error, AlgorithmError) else "privacy-unusable"
            _pause(membership, record, cause, str(error))
        return None
    except (UnknownBlob, FedcoreError) as error:
        if record.state is TaskState.ACTIVE:
            with membership.writing() as records:
                pause_unreadable(records, record, str(error))
        return None


def unreliable_devices(records: Records, task: Task) -> dict[str, int]:
    """The unreliable devices of a task, as the rows have them: `OpenRounds.unreliable`."""
    committed = records.snapshot(task).number
    since, buffered = committed - UNRELIABLE_ROUNDS + 1, task.settings.buffered is not None
    unreliable = records.cohorts.unreliable_devices(task.id, since, buffered=buffered)
    return {device: UNRELIABLE_ROUNDS + number - committed for device, number in unreliable.items()}


def pause_unreadable(records: Records, task: Task, words: str) -> None:
    """Pause an active task that needs a blob which cannot be read; an operator resumes it once the blob is back."""
    _LOG.error("task %s is paused: a blob that it needs cannot be read: %s", task.named, words)
    remedy = "put the blobs back, or mount their place, then resume it"
    records.move_task(task, TaskState.PAUSED, "blob-unreadable", f"a blob cannot be read: {words}; {remedy}")


def _hold_out(settings: TaskSettings) -> DeviceHoldOut | None:
    if not settings.hold_out_devices:
        return None
    return DeviceHoldOut(settings.population, settings.hold_out_devices, settings.on_held_out)


def _look_for(store: CoordinatorStore, record: Task, lineage: str, plan: Plan) -> None:
    """Raise AlgorithmError unless the algorithm can be made, UnknownBlob unless plan, its blobs and state are there.

    The same for what evaluates its models, if anything does.

    For a private task, raise PrivacyError when the accountant is not installed, which takes a second to load, here and
    not while a round is committed; KeysDiffer when noise of earlier rounds was made with another key.
    """
    store.algorithm(record.algorithm)
    if record.settings.privacy is not None:
        promise = record.settings.promise
        spent([promise], promise.delta)
    if other := _other_noise(store, record, lineage):
        raise KeysDiffer(
            f"{OTHER_LINEAGE}: noise of earlier rounds was made with {other}, and the key here is {lineage}: put the "
            "file with the right key back, and the task goes on"
        )
    with store.database.reading() as records:
        base = records.snapshot(record)
    named = {ref.sha256 for ref in plan.blob_refs}
    if record.evaluation is not None:
        store.algorithm(record.evaluation.bundle.algorithm)
        named |= {record.evaluation.bundle.plan.sha256, record.evaluation.bundle.state.sha256}
    for sha256 in sorted(named | {record.plan_sha256, base.state_sha256, base.checkpoint_sha256}):
        if not store.blobs.has(sha256):
            raise UnknownBlob(f"there is no blob {sha256[:12]}…")


def _other_noise(store: CoordinatorStore, record: Task, lineage: str) -> str:
    """A key other than this one that made noise of earlier rounds of a task; empty where there is none."""
    with store.database.reading() as records:
        return min({source.signer for source in records.ledger.sources(record.id)} - {lineage}, default="")


def _pause(membership: Membership, record: Task, cause: str, words: str) -> Task:
    _LOG.error("task %s is paused: %s", record.named, words)
    with membership.writing() as records:
        records.move_task(record, TaskState.PAUSED, cause, words)
    return dataclasses.replace(record, state=TaskState.PAUSED, reason=words)


# Open rounds: those that have not ended, as the driver has them in memory.


class OpenRound(msgspec.Struct, frozen=True):
    """A round that has not ended: its row, its value, and its secure aggregation if it has one.

    opened_at, entered_at: when it was opened, and when its present step began, on the driver's clock. base: the model
    that it starts from; while the round is held, the model that the round before it starts from.
    members: the devices that it may draw, as the second trip of the same cohort; None when any device may be drawn.
    devices: all that were given an assignment in it, also those that gave up or were lost; of a buffered round those
    whose reports it counted. It draws none of them again. failing: the devices that gave up or were lost; of a buffered
    round, where its rule counts failures, also those that were late. predecessor: the row id of the round whose open
    assignments it took over. told: how many reports each other replica has told of that it took. uncertain_since: since
    when a device is silent whose report another replica took, and did not tell of.
    """

    id: int
    attempt: int
    opened_at: float
    base: Snapshot
    task: LoadedTask
    value: Round
    entered_at: float
    secure: SecureRound | None = None
    devices: frozenset[str] = frozenset()
    members: frozenset[str] | None = None
    failing: frozenset[str] = frozenset()
    predecessor: int | None = None
    told: Mapping[str, int] = msgspec.field(default_factory=dict)
    uncertain_since: float = math.inf

    @property
    def buffered(self) -> bool:
        """Whether devices come and report at their own speed."""
        return self.value.policy.buffered

    def after(self, event: Event, now: float) -> Stepped:
        """The round's value after `event`, and what must be done about it. Raises UnexpectedEvent."""
        return buffers.step(self.value, event) if self.buffered else round_rules.step(self.value, event, now)

    @property
    def numbers(self) -> range:
        """The numbers of the rounds whose assignments may report to it."""
        return buffers.drawn_in(self.number, self.task.settings.max_staleness)

    def report_within_s(self, now: float) -> float:
        """How long a device has that is given an assignment now."""
        policy = self.value.policy
        return policy.reporting_deadline_s if policy.buffered else self.value.deadline - now

    @property
    def reporting(self) -> bool:
        """Whether its devices may still report."""
        return self.value.state is RoundState.REPORTING

    def doubted(self, now: float) -> OpenRound:
        """The same round, from now on in doubt about a report of which another replica did not tell."""
        return replace(self, uncertain_since=min(self.uncertain_since, now))

    @property
    def shared(self) -> bool:
        """Whether other replicas may sum reports of it."""
        return may_share(self.task.settings)

    @property
    def number(self) -> int:
        """The round's number, once it is not held any more."""
        return self.base.number + 1

    @property
    def plan(self) -> Plan:
        """The plan of the trip that the round runs, once it is not held any more."""
        return self.task.plan.of_round(self.number)

    @property
    def codec_key(self) -> RoundKey:
        """The key of the codecs of its reports, once it is not held any more."""
        return RoundKey(self.task.settings.seed, self.number)

    def draws_more(self, now: float) -> bool:
        """Whether a reporting round may draw devices: in place of lost ones, or any that come to a buffered round."""
        if self.buffered:
            return buffers.places(self.value) > 0
        return self.value.missing(now) > 0 and (self.secure is None or self.secure.advertising)


@dataclass(frozen=True, slots=True)
class OpenRounds:
    """The open rounds of every task, by its id: the one that runs, and the one that is held behind it.

    not_before: when the next round of a task may begin, on the driver's clock, after attempts that failed.
    left_out: devices that further attempts at a task's next round must not draw. unreliable: devices that held up a
    round without a report and brought none since, and for how many committed rounds they are drawn last from now on:
    more than UNRELIABLE_ROUNDS for those who did so in an earlier attempt at the next round.
    """

    running: dict[str, OpenRound] = field(default_factory=dict)
    held: dict[str, OpenRound] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, frozenset[str]] = field(default_factory=dict)
    unreliable: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def copy(self) -> OpenRounds:
        """A copy, to be changed while this one stays."""
        return self.only({round_.id for round_ in self})

    def only(self, row_ids: Container[int]) -> OpenRounds:
        """A copy with only these rounds."""
        running, held = (
            {task: round_ for task, round_ in rounds.items() if round_.id in row_ids}
            for rounds in (self.running, self.held)
        )
        return OpenRounds(running, held, dict(self.not_before), dict(self.left_out), dict(self.unreliable))

    def __iter__(self) -> Iterator[OpenRound]:
        yield from self.running.values()
        yield from self.held.values()

    def put(self, round_: OpenRound) -> None:
        """Keep a round as it is now, or drop it if it has ended."""
        task = round_.task.id
        for rounds in (self.running, self.held):
            if task in rounds and rounds[task].id == round_.id:
                del rounds[task]
        if not round_.value.state.ended:
            (self.held if round_.value.held else self.running)[task] = round_

    def must_hold(self, task: str, now: float) -> bool:
        """Whether a task's next round is held: while another one runs, or during a pause after failed attempts."""
        return task in self.running or now < self.not_before.get(task, now)

    def rounds_before_draw(self, task: str) -> int:
        """How many rounds of a task must end before the one that draws devices next can."""
        running = self.running.get(task)
        return 0 if running is None or running.value.state in (RoundState.SELECTING, RoundState.CONFIGURING) else 1

    def members(self, task: str) -> frozenset[str] | None:
        """The devices that a task's round may draw; None when any device may be drawn."""
        round_ = self.running.get(task) or self.held.get(task)
        return None if round_ is None else round_.members

    def awaited(self, task: LoadedTask) -> frozenset[str]:
        """The devices that should come back soon, because the second trip of the same cohort waits or will wait."""
        running = self.running.get(task.id)
        if running is None or not task.settings.same_cohort:
            return frozenset()
        if running.members is None:
            return running.devices
        return running.members if running.value.state is RoundState.SELECTING else frozenset()

    def leave_out(self, task: str, devices: Mapping[str, LeftOut]) -> None:
        """Draw these devices no more before the task's next round is committed; suspects are unreliable after it."""
        self.left_out[task] = self.left_out.get(task, frozenset()).union(devices)
        self.note_unreliable(task, [device for device, why in devices.items() if why is LeftOut.SUSPECTED])

    def note_unreliable(self, task: str, devices: Iterable[str]) -> None:
        """Devices held up an attempt at the task's next round without a report."""
        noted = dict.fromkeys(devices, UNRELIABLE_ROUNDS + 1)
        self.unreliable[task] = {**self.unreliable.get(task, {}), **noted}

    def note_report(self, task: str, device: str) -> None:
        """A device reported: it is unreliable no more."""
        unreliable = self.unreliable.get(task, {})
        if device in unreliable:
            self.unreliable[task] = {name: left for name, left in unreliable.items() if name != device}

    def commit(self, task: str) -> None:
        """The task's next round was committed."""
        self.left_out.pop(task, None)
        unreliable = self.unreliable.get(task, {})
        self.unreliable[task] = {device: left - 1 for device, left in unreliable.items() if left > 1}

    def selects(self, task: LoadedTask) -> bool:
        """Whether a task's round draws devices now, also if the task was paused since."""
        running = self.running.get(task.id)
        return running is not None and running.value.state is RoundState.SELECTING

    def may_open(self, task: LoadedTask, now: float) -> bool:
        """Whether a task may begin to select devices: for its next round, or for the one after that which reports."""
        if not task.active or task.id in self.held:
            return False
        if task.settings.buffered is not None:
            return not self.must_hold(task.id, now)
        running = self.running.get(task.id)
        if running is None or task.settings.same_cohort:
            # Which devices a second trip may draw is known only when the first one has ended.
            return running is None
        return not self.selects(task) and running.number < task.settings.rounds

    def next_event(
        self, round_: OpenRound, task: LoadedTask | None, eligible: Callable[[OpenRound], Sized], now: float
    ) -> Event:
        """The event that is due for a round now, apart from reports and lost devices.

        task: as it stands; None when it is over. eligible: finds the devices that a round could draw.
        """
        if task is None:
            return Abandon("cancelled")
        deserted = round_.buffered and round_.reporting and not round_.value.outstanding
        if (round_.value.held or deserted) and not task.active:
            return Abandon("paused")
        if round_.value.state is RoundState.SELECTING:
            held = self.must_hold(round_.task.id, now)
            # A round that stays held draws no device: those that wait need not be counted.
            return Waiting(0 if round_.value.held and held else len(eligible(round_)), held)
        # A buffered round has no deadline, so a pause ends its draws.
        may_draw = task.active or not round_.buffered
        secure = round_.secure if round_.reporting else None
        if secure is not None and (secure.event is not None or secure.unmasking):
            return secure.event or Revealed()
        return Waiting(len(eligible(round_))) if round_.draws_more(now) and may_draw else Tick()
