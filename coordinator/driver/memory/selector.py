"""Selection of devices: those that a round could draw, and those that took part too recently."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Set as AbstractSet
from dataclasses import dataclass, field

from coordinator.driver.memory.open_rounds import LoadedTask, OpenRound, OpenRounds
from coordinator.driver.memory.sessions import Session, Sessions
from coordinator.rules.entities import Task
from coordinator.rules.selection import UNRELIABLE_ROUNDS, Participation, Participations, draw, drawable
from coordinator.rules.states import AssignmentState, RoundState
from coordinator.rules.task_settings import Separation
from coordinator.secure.round import SecureRoundFactory
from coordinator.store.records.records import Records


class ParticipationLimit:
    """The participations of every task that asks for a separation. Other tasks have no limit, and nothing is kept."""

    def __init__(self) -> None:
        self._tasks: dict[str, Participations] = {}
        self._populations: dict[str, str] = {}

    def learn(self, records: Records, tasks: Iterable[Task], now: float) -> None:
        """Keep these tasks, and no others: of those that are new here the participations are read."""
        asking = [(task, task.settings.separation) for task in tasks]
        self._tasks = {
            task.id: self._tasks.get(task.id) or _read(records, task, separation, now)
            for task, separation in asking
            if separation is not None
        }
        self._populations = {task.id: task.settings.population for task, _ in asking}

    def forget(self) -> None:
        """Read everything again at the next `learn`: after a failed transaction memory may be wrong."""
        self._tasks = {}

    def drop_populations(self, populations: AbstractSet[str]) -> None:
        """Read those of these populations again at the next `learn`: another replica may have drawn devices since."""
        gone = {task for task in self._tasks if self._populations.get(task) in populations}
        self._tasks = {task: taken for task, taken in self._tasks.items() if task not in gone}

    def is_resting(self, task: str, device: str, now: float, rounds_before: int | None = None) -> bool:
        """Whether a device may not yet be drawn for a round of a task: `Participations.is_resting`. From any thread."""
        # Asked for once: the driver's thread may take it away in between.
        participations = self._tasks.get(task)
        return participations is not None and participations.is_resting(device, now, rounds_before)

    def remaining(self, task: str, device: str, now: float) -> tuple[float, int]:
        """Seconds, and committed rounds, until a device may take part again. From any thread."""
        participations = self._tasks.get(task)
        return (0.0, 0) if participations is None else participations.remaining(device, now)

    def leave_out(self, left_out: Mapping[str, AbstractSet[str]]) -> None:
        """Count the devices, by task, that are left out of further attempts at a round: `Participations.leave_out`."""
        for task, devices in left_out.items():
            if task in self._tasks:
                self._tasks[task].leave_out(devices)

    def add(self, task: str, devices: Iterable[str], now: float) -> None:
        """Add devices to the round of a task that runs."""
        if task in self._tasks:
            self._tasks[task].add(devices, now)

    def leave(self, task: str, device: str) -> None:
        """Drop a device that gave its assignment up, or was lost."""
        if task in self._tasks:
            self._tasks[task].leave(device)

    def end(self, task: str, now: float, *, committed: bool, going_on: AbstractSet[str] = frozenset()) -> None:
        """End the round of a task that ran: `Participations.end`."""
        if task in self._tasks:
            self._tasks[task].end(now, committed=committed, going_on=going_on)


def _read(records: Records, task: Task, separation: Separation, now: float) -> Participations:
    committed = records.snapshot(task).number
    # A device may rest from round `committed + 1` if it took part in one of the `rounds - 1` before that, or later.
    numbers = range(committed - separation.rounds + 2, committed + 1)
    rows = records.cohorts.participations(task.id, numbers, records.at - separation.seconds)
    earlier = (Participation(device, now - (records.at - at), number) for device, at, number in rows)
    return Participations(separation, committed, earlier)


@dataclass(frozen=True, slots=True)
class Selector:
    """The sources of cohorts: waiting devices, earlier participations, a random source, secure rounds."""

    sessions: Sessions
    source: random.Random
    secure: SecureRoundFactory
    participation: ParticipationLimit = field(default_factory=ParticipationLimit)

    def eligible(self, task: LoadedTask, rounds: OpenRounds, now: float) -> list[Session]:
        """The waiting devices that could be drawn for a task's next round, as its rounds stand."""
        return self._free(task, rounds, rounds.rounds_before_draw(task.id), now)

    def candidates(self, round_: OpenRound, rounds: OpenRounds, now: float) -> list[Session]:
        """The waiting devices that a round could draw now: as `in_time`, but for unreliable ones that must wait."""
        waiting, unreliable = self.in_time(round_, rounds, now), _unreliable(round_, rounds)
        if not unreliable or round_.buffered:
            return waiting
        return drawable(waiting, lambda session: unreliable.get(session.device, 0), round_.value, now)

    def in_time(self, round_: OpenRound, rounds: OpenRounds, now: float) -> list[Session]:
        """The waiting devices that a round could draw before it ends, without those that it drew before."""
        if not round_.reporting:
            return self.eligible(round_.task, rounds, now)
        return [session for session in self._free(round_.task, rounds, 0, now) if session.device not in round_.devices]

    def draw(self, candidates: list[Session], count: int, unreliable: Container[str]) -> list[Session]:
        """`count` of the candidates, drawn uniformly; unreliable devices only where there are too few others."""
        return draw(candidates, count, self.source, lambda session: session.device in unreliable)

    def due(self, task_id: str, task: LoadedTask | None, rounds: OpenRounds, now: float) -> bool:
        """Whether, by what memory knows, `Transaction.advance` would do anything."""

        def eligible(round_: OpenRound) -> list[Session]:
            return self.candidates(round_, rounds, now)

        for by_task in (rounds.running, rounds.held):
            if task_id in by_task:
                round_ = by_task[task_id]
                if task is not None and self._too_few(round_, now):
                    continue
                event = rounds.next_event(round_, task, eligible, now)
                if round_.after(event, now) != (round_.value, ()) or self.missing(round_, now):
                    return True
        return task is not None and rounds.may_open(task, now) and bool(self.eligible(task, rounds, now))

    def missing(self, round_: OpenRound, now: float) -> dict[str, AssignmentState]:
        """How open assignments end that a buffered or a secure round goes on without; those of others end with it."""
        if round_.buffered:
            return dict.fromkeys(self.sessions.late(round_.task.id, now), AssignmentState.EXPIRED)
        gone = round_.secure.missing if round_.secure is not None and round_.reporting else {}
        open_ = self.sessions.at_work(round_.task.id) if gone else {}
        return {name: how for name, how in gone.items() if name in open_}

    def left_out(self, task: LoadedTask, rounds: OpenRounds, rounds_before: int) -> frozenset[str]:
        """The devices that a draw must pass by for what they did in an earlier attempt at its round."""
        return frozenset() if rounds_before else rounds.left_out.get(task.id, frozenset())

    def _free(self, task: LoadedTask, rounds: OpenRounds, rounds_before: int, now: float) -> list[Session]:
        left_out = self.left_out(task, rounds, rounds_before)
        members = None if rounds_before else rounds.members(task.id)
        return [
            session
            for session in self.sessions.eligible(task.population, task.id, task.needs)
            if session.device not in left_out
            and (members is None or session.device in members)
            and not self.participation.is_resting(task.id, session.device, now, rounds_before)
        ]

    def _too_few(self, round_: OpenRound, now: float) -> bool:
        """Whether too few devices wait for the round to draw yet, even if all are eligible."""
        value = round_.value
        selecting = value.state is RoundState.SELECTING and not value.held and now < value.deadline
        return selecting and self.sessions.count(round_.task.population) < value.policy.cohort


def _unreliable(round_: OpenRound, rounds: OpenRounds) -> Mapping[str, int]:
    """The unreliable devices of a task; of a cohort that is drawn again those that held up an attempt at this round."""
    unreliable = rounds.unreliable.get(round_.task.id, {})
    if round_.members is None:
        return unreliable
    return {device: left for device, left in unreliable.items() if left > UNRELIABLE_ROUNDS}
