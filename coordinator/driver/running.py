"""What a driver has in hand: tasks ready to run, and their rounds that have not ended."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sized
from dataclasses import asdict, dataclass, field, replace

from coordinator.rules.rounds import Abandon, Event, Revealed, Round, RoundState, TaskState, Tick, Waiting
from coordinator.rules.selection import Needs
from coordinator.rules.state import Snapshot, Task
from coordinator.secure.round import SecureRound
from fedcore.plan import Plan
from fedcore.wire.messages import Offer


@dataclass(frozen=True, slots=True)
class Job:
    """A task with its plan and what it needs of a device."""

    task: Task
    plan: Plan
    needs: Needs

    @classmethod
    def of(cls, task: Task, plan: Plan) -> Job:
        """The job that a task and its plan make."""
        settings = task.settings
        needs = Needs(frozenset(plan.graphs), plan.examples.collection, settings.min_examples, settings.requires)
        return cls(task, plan, needs)

    def paused(self) -> Job:
        """The same, opening no other round."""
        return replace(self, task=replace(self.task, state=TaskState.PAUSED))

    @property
    def active(self) -> bool:
        """Whether new rounds may begin."""
        return self.task.state is TaskState.ACTIVE

    @property
    def offer(self) -> Offer:
        """What a device is told of the task before it waits."""
        alone = asdict(self.task.settings.on_device)
        return Offer(task=self.task.id, collection=self.needs.collection, **alone)

    @property
    def population(self) -> str:
        """Whose devices take part."""
        return self.task.settings.population


@dataclass(frozen=True, slots=True)
class RunningRound:
    """A round that has not ended: its row, its value, and its masked sum if it has one.

    opened_at, entered_at: when it was opened, and when its present step began, on the driver's clock. base: the model
    that it starts from. While the round is held, the one before it.
    devices: all that were given an assignment in it, whatever became of them.
    """

    id: int
    attempt: int
    opened_at: float
    base: Snapshot
    job: Job
    value: Round
    entered_at: float
    secure: SecureRound | None = None
    devices: frozenset[str] = frozenset()

    @property
    def reporting(self) -> bool:
        """Whether its devices may still report."""
        return self.value.state is RoundState.REPORTING

    def draws(self, now: float) -> bool:
        """Whether devices may be drawn in the place of lost ones."""
        return self.value.missing(now) > 0 and (self.secure is None or self.secure.advertising)

    @property
    def number(self) -> int:
        """The round's number, once it is not held any more."""
        return self.base.number + 1


@dataclass(frozen=True, slots=True)
class Underway:
    """The rounds that have not ended, by task: the one that runs, and the one that is held behind it.

    not_before: when the next round of a task may begin, on the driver's clock, after attempts that failed.
    """

    running: dict[str, RunningRound] = field(default_factory=dict)
    held: dict[str, RunningRound] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)

    def copy(self) -> Underway:
        """Another one, to be changed while this one stays."""
        return Underway(dict(self.running), dict(self.held), dict(self.not_before))

    def only(self, row_ids: Container[int]) -> Underway:
        """Another one, of these rounds alone."""
        running, held = (
            {task: round_ for task, round_ in rounds.items() if round_.id in row_ids}
            for rounds in (self.running, self.held)
        )
        return Underway(running, held, dict(self.not_before))

    def __iter__(self) -> Iterator[RunningRound]:
        yield from self.running.values()
        yield from self.held.values()

    def put(self, round_: RunningRound) -> None:
        """Remember a round as it is now, or forget it if it has ended."""
        task = round_.job.task.id
        for rounds in (self.running, self.held):
            if task in rounds and rounds[task].id == round_.id:
                del rounds[task]
        if not round_.value.state.ended:
            (self.held if round_.value.held else self.running)[task] = round_

    def holds(self, task: str, now: float) -> bool:
        """Whether a task's next round must wait: for the one that runs, or for the end of a pause."""
        return task in self.running or now < self.not_before.get(task, now)

    def ahead(self, task: str) -> int:
        """How many rounds of a task must end before the one that draws devices next can."""
        running = self.running.get(task)
        return 0 if running is None or running.value.state in (RoundState.SELECTING, RoundState.CONFIGURING) else 1

    def selects(self, job: Job) -> bool:
        """Whether a task's round draws devices now, also if the task was paused since."""
        running = self.running.get(job.task.id)
        return running is not None and running.value.state is RoundState.SELECTING

    def may_open(self, job: Job) -> bool:
        """Whether a task may begin to select devices: for its next round, or for the one after that which reports."""
        task, settings = job.task.id, job.task.settings
        if not job.active or task in self.held:
            return False
        ahead = self.running.get(task)
        return ahead is None or (not self.selects(job) and ahead.number < settings.rounds)

    def next_event(
        self, round_: RunningRound, job: Job | None, eligible: Callable[[RunningRound], Sized], now: float
    ) -> Event:
        """What a round must be told now, apart from reports and devices that are lost.

        job: its task as it stands; None when that is over. eligible: finds the devices that a round could draw.
        """
        if job is None:
            return Abandon("cancelled")
        if round_.value.held and not job.active:
            return Abandon("paused")
        if round_.value.state is RoundState.SELECTING:
            held = self.holds(round_.job.task.id, now)
            # A round that stays held draws nobody: who waits need not be counted.
            return Waiting(0 if round_.value.held and held else len(eligible(round_)), held)
        secure = round_.secure if round_.reporting else None
        if secure is not None and (secure.event is not None or secure.unmasking):
            return secure.event or Revealed()
        return Waiting(len(eligible(round_))) if round_.draws(now) else Tick()
