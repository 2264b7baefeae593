"""Recent participation: which devices must not take part in a task yet. In memory; the rows are the truth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from coordinator.rules.entities import Task
from coordinator.rules.participation import Participation, Participations
from coordinator.rules.task_settings import Separation
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
