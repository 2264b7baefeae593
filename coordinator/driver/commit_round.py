"""Commit of a round that has its reports: the next checkpoint, in one transaction."""

from __future__ import annotations

import logging

from prometheus_client import Histogram

from coordinator.driver.failed_attempts import note_failure
from coordinator.driver.loading import pause_unreadable
from coordinator.driver.open_rounds import OpenRound
from coordinator.driver.replica_membership import Membership
from coordinator.errors import NonFiniteState, UnknownBlob, UnreadableBlob
from coordinator.failpoints import reach
from coordinator.lineage import entry
from coordinator.rules.aggregation import ReportSum, aggregate, state_specs
from coordinator.rules.entities import Snapshot
from coordinator.rules.robust_aggregation import KeptReports
from coordinator.rules.rounds import Abandon, Aggregated, Round, TaskState, step
from coordinator.store.records import Records
from coordinator.store.tasks import CoordinatorStore
from fedcore import algorithms, checkpoint
from fedcore.errors import FedcoreError, ReportError
from fedcore.plan import BlobRef
from fedcore.signing import SigningKey

_LOG = logging.getLogger(__name__)


def commit_round(
    membership: Membership,
    lineage: SigningKey,
    running: OpenRound,
    reports: ReportSum | KeptReports,
    now: float,
    steps: Histogram,
) -> tuple[Round, float]:
    """Commit the round with the sum of its reports, or abandon it when that is unusable. `steps` observes the times.

    lineage: signs the checkpoint of a task with a release.

    Answers how it ended, and for how many seconds the task must open no other, which is 0 but after failed attempts.

    A state that is no longer finite also pauses the task: another attempt from the same checkpoint would likely end
    there too, and an operator may go back to an earlier model. So does a server state that cannot be read. When
    anything else raises (the disk is full, say), the round is as it was and can be closed later.
    """
    try:
        with steps.labels("update").time():
            state, broadcast, metrics = _next_model(membership.store, running, reports)
    except ReportError as error:
        _LOG.warning("round %d of task %s has an unusable sum: %s", running.number, running.task.id, error)
        with membership.writing() as records:
            value = _end(records, running, Abandon("invalid-aggregate"), now)
            if running.secure is not None:
                records.leave_out(running.secure.left_out)
            return value, note_failure(records, running, "invalid-aggregate")
    except NonFiniteState as error:
        return _pause(membership, running, str(error), now), 0.0
    except UnreadableBlob as error:
        with membership.writing() as records:
            value, task = _end(records, running, Abandon("blob-unreadable"), now), records.task(running.task.id)
            if task.state is TaskState.ACTIVE:
                pause_unreadable(records, task, str(error))
            return value, 0.0
    with steps.labels("commit").time(), membership.writing() as records:
        task = records.task(running.task.id)
        if task.state not in (TaskState.ACTIVE, TaskState.PAUSED):
            return _end(records, running, Abandon("cancelled"), now), 0.0
        membership.store.add_blobs(records, {state: False})
        membership.store.add_blobs(records, {broadcast: True})
        value = _end(records, running, Aggregated(), now)
        signed = entry(lineage, task, running.base, broadcast.sha256)
        records.finish_round(running.id, Snapshot(running.number, state.sha256, broadcast.sha256, signed), metrics)
        if running.number == task.settings.rounds:
            records.move_task(task, TaskState.COMPLETED, "its last round was committed")
        reach("round.before-commit")
    reach("round.after-commit")
    _LOG.info("round %d of task %s committed %d reports", running.number, task.id, running.value.reported)
    return value, 0.0


def _next_model(
    store: CoordinatorStore, running: OpenRound, reports: ReportSum | KeptReports
) -> tuple[BlobRef, BlobRef, dict[str, float]]:
    plan, task = running.task.plan, running.task.record
    algorithm = algorithms.create(task.algorithm.name, task.algorithm.settings)
    try:
        state = checkpoint.decode(store.blobs.get(running.base.state_sha256), state_specs(plan, algorithm))
    except (UnknownBlob, FedcoreError) as error:
        raise UnreadableBlob(f"the server state before round {running.number}: {error}") from error
    made = aggregate(plan.report, algorithm, state, reports.total())
    # Files first: a row must never point at a blob that is not there.
    refs = [store.blobs.put(checkpoint.encode(vectors)) for vectors in (made.state, made.broadcast)]
    return refs[0], refs[1], made.metrics


def _pause(membership: Membership, running: OpenRound, words: str, now: float) -> Round:
    with membership.writing() as records:
        value = _end(records, running, Abandon("non-finite-state"), now)
        task = records.task(running.task.id)
        _LOG.error("round %d of task %s has no finite model: %s", running.number, task.id, words)
        if task.state is TaskState.ACTIVE:
            records.move_task(task, TaskState.PAUSED, "non-finite-state", f"round {running.number}: {words}")
    return value


def _end(records: Records, running: OpenRound, event: Aggregated | Abandon, now: float) -> Round:
    value, _ = step(running.value, event, now)
    records.move_round(running.id, running.value, value, value.reason or "aggregated")
    return value
