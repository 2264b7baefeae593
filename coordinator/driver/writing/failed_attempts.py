"""Rounds that fail or cannot be: how long a task pauses after failed attempts, and when an operator must look."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from coordinator.driver.memory.open_rounds import OpenRound, OpenRounds
from coordinator.errors import UnknownRound
from coordinator.lineage import entry
from coordinator.rules.divergence import DIVERGED, FIRST_ROUNDS, MOST_ROUNDS, START, LossCounts, divergence
from coordinator.rules.entities import Task
from coordinator.rules.rounds import back_off_s
from coordinator.rules.states import TaskState
from coordinator.store.records.records import Records
from fedcore.signing import SigningKey

_LOG = logging.getLogger(__name__)


def note_failing(
    round_: OpenRound, devices: Sequence[str], rounds: OpenRounds, *, late: bool = False
) -> tuple[OpenRound, int]:
    """The round that knows which devices failed in it, and how many of these failed before.

    late: they held it up, whatever comes of it.
    """
    before = round_.failing if round_.buffered else rounds.unreliable.get(round_.task.id, {}).keys()
    if round_.buffered or late:
        rounds.note_unreliable(round_.task.id, devices)
    return replace(round_, failing=round_.failing.union(devices)), len(before & set(devices))


def note_failure(records: Records, round_: OpenRound, reason: str) -> float:
    """Note that an attempt at a round failed; answers for how many seconds the task must open no other.

    A task whose attempts fail too often in a row is paused: its plan, or the devices' data, needs an operator.
    """
    task = records.task(round_.task.id)
    failures, most = records.attempts.failures(task.id, round_.number), task.settings.max_attempts
    if failures >= most and task.state is TaskState.ACTIVE:
        words = f"round {round_.number} failed {failures} times in a row, at last with {reason}"
        _LOG.error("task %s is paused: %s", task.named, words)
        records.move_task(task, TaskState.PAUSED, reason, f"{words}; find out why, then resume it")
    return back_off_s(failures)


def why_diverged(records: Records, task: Task, metrics: dict[str, float], losses: LossCounts | None) -> str:
    """Why an active task diverges with a round of these metrics, which is about to be committed; "" if it does not.

    losses: how many devices reached each level of loss, where the plan counts them. The first round since the task was
    made active gets what they were before training into its metrics.
    """
    growth, attempts = task.settings.max_loss_growth, records.attempts
    if not growth or task.state is not TaskState.ACTIVE:
        return ""
    first = attempts.first_metrics(task.id, FIRST_ROUNDS)
    if losses is not None and not first:
        metrics |= losses.start()
    start = (first or [metrics])[0].get(START)
    latest = [*attempts.latest_metrics(task.id, MOST_ROUNDS - 1), metrics]
    return divergence(first, latest, growth) or (losses.explosion(start, growth) if losses is not None else "")


def pause_diverged(records: Records, task: Task, number: int, why: str) -> None:
    """Pause a task that diverged with round `number`: an operator goes back to an earlier model, or lets it go on."""
    words = f"{DIVERGED} in round {number}: {why}"
    _LOG.error("task %s is paused: %s", task.named, words)
    remedy = "roll it back to an earlier round, or resume it if that is as it should be"
    records.move_task(task, TaskState.PAUSED, DIVERGED, f"{words}; {remedy}")


def begin_pair_again(records: Records, task: Task, lineage: SigningKey) -> None:
    """Roll a task back to before its last round, because the cohort of that one is gone; the next is a first trip.

    lineage: signs the checkpoint of a task with a release. The task is paused when this happened too often in a row, or
    when the model is no longer kept, which only an operator's earlier rollback can cause.
    """
    task, last = records.task(task.id), records.snapshot(task)
    times = records.attempts.pairs_begun_again(task)
    words = f"too few of the devices that round {last.number} counted came back for round {last.number + 1}"
    try:
        to = records.snapshot(task, records.made_in(task, last) - 1)
    except UnknownRound as error:
        remedy = f"roll it back to an earlier round: {error}"
    else:
        records.roll_back(task, to, entry(lineage, task, last, to.checkpoint_sha256), f"{words}; the pair begins again")
        if times < task.settings.max_attempts:
            return
        words, remedy = f"{words}, {times} times in a row", "resume it, or create it anew without same_cohort"
    if task.state is TaskState.ACTIVE:
        _LOG.error("task %s is paused: %s", task.named, words)
        records.move_task(task, TaskState.PAUSED, "cohort-gone", f"{words}; {remedy}")


def pause_without_authority(records: Records, task: Task) -> None:
    """Pause a task whose rounds are secure, where the coordinator has no enrolment authority."""
    words = (
        "secure rounds need an enrolment authority: run `muster authority serve`, start the coordinator with "
        "--authority and --authority-url, then resume the task"
    )
    _LOG.error("task %s is paused: %s", task.named, words)
    records.move_task(task, TaskState.PAUSED, "no-authority", words)
