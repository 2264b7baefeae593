"""Open rounds: those that have not ended, as the driver has them in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from coordinator.driver.memory.loaded_task import LoadedTask
from coordinator.rules import buffers, rounds as round_rules
from coordinator.rules.entities import Snapshot
from coordinator.rules.replicas import may_share
from coordinator.rules.rounds import Abandon, Event, Revealed, Round, Stepped, Tick, Waiting
from coordinator.rules.selection import UNRELIABLE_ROUNDS
from coordinator.rules.states import LeftOut, RoundState
from coordinator.secure.round import SecureRound
from fedcore.codecs import RoundKey
from fedcore.plan import Plan


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
