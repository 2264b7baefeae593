"""The rows of a round that begins to collect devices, and of a task that may do so."""

from __future__ import annotations

from coordinator.driver.memory.loaded_task import LoadedTask
from coordinator.driver.memory.open_rounds import OpenRound, OpenRounds
from coordinator.rules.buffers import open_buffer
from coordinator.rules.rounds import open_round
from coordinator.rules.states import TaskState
from coordinator.store.records.records import Records
from fedcore.plan import is_second


def open_round_of(records: Records, rounds: OpenRounds, task: LoadedTask, now: float) -> OpenRound:
    """Open the next round of a task, and put it among `rounds`; held, as long as it must wait for another one."""
    running = rounds.running.get(task.id)
    base = running.base if running else records.snapshot(task.record)
    number = base.number + (2 if running else 1)
    members = None
    if task.settings.same_cohort and is_second(number):
        members = records.cohorts.counted_devices(task.id, records.made_in(task.record, base))
    policy = task.settings.in_round(number).policy.among(None if members is None else len(members))
    held = rounds.must_hold(task.id, now)
    value = open_buffer(policy) if policy.buffered else open_round(policy, now, held=held)
    row_id, attempt = records.add_round(task.id, number, value)
    round_ = OpenRound(row_id, attempt, now, base, task, value, now, members=members)
    rounds.put(round_)
    return round_


def as_it_stands(records: Records, task: LoadedTask) -> LoadedTask | None:
    """A task as it is by now, if an operator or this very transaction moved it; None when it is over."""
    match records.task(task.id).state:
        case TaskState.ACTIVE:
            return task
        case TaskState.PAUSED:
            return task.paused()
    return None
