"""Commit of a round that has its reports, and the end of one that failed, in one transaction."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray
from prometheus_client import Histogram

from coordinator.driver.memory.open_rounds import OpenRound, OpenRounds, pause_unreadable
from coordinator.driver.memory.round_sums import BUDGET_SPENT, PrivateSum, RoundSum, make_private, write_row
from coordinator.driver.replica_membership import Membership
from coordinator.driver.writing.make_assignments import HandOver, begin_again, end_or_keep, open_next
from coordinator.errors import NonFiniteState, Unavailable, UnknownBlob, UnknownRound, UnreadableBlob
from coordinator.failpoints import reach
from coordinator.keys import entry
from coordinator.rules.aggregation import KeptReports, ReportSum, Vectors, aggregate, held_sum, state_specs
from coordinator.rules.buffers import discount
from coordinator.rules.entities import AssignedDevice, SealedBlob, Snapshot, Task
from coordinator.rules.kinds import QUIET, regular_task
from coordinator.rules.private_sums import clip_of
from coordinator.rules.progress import DIVERGED, FIRST_ROUNDS, MOST_ROUNDS, START, LossCounts, divergence
from coordinator.rules.rounds import Abandon, Aggregated, EndAssignments, Round, back_off_s
from coordinator.rules.states import LeftOut, RoundState, TaskState
from coordinator.store.database import STORE_FAILURES
from coordinator.store.records.records import Records
from coordinator.store.tasks import CoordinatorStore
from fedcore import checkpoint
from fedcore.algorithms.algorithm import Algorithm, ServerStep, trips_of
from fedcore.errors import FedcoreError, ReportError
from fedcore.plan import BlobRef, in_turn
from fedcore.release import Signed
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


class Start(NamedTuple):
    """The blobs with which a model is evaluated: server state and broadcast. params: the digest of the model."""

    state: BlobRef
    broadcast: BlobRef
    params: str


def store_start(store: CoordinatorStore, training: Task, number: int, model: Vectors) -> Start | None:
    """Store the server state and the broadcast with which the model after a round is evaluated; None if it is not due.

    model: what is broadcast after the round. Raises UnreadableBlob.
    """
    regular = training.evaluation
    if regular is None or not regular.due(number):
        return None
    algorithm = store.algorithm(regular.bundle.algorithm)
    try:
        specs = state_specs(store.plan(regular.bundle.plan.sha256), algorithm)
        state = checkpoint.decode(store.blobs.get(regular.bundle.state.sha256), specs)
    except (UnknownBlob, FedcoreError) as error:
        raise UnreadableBlob(f"what evaluates the model after round {number}: {error}") from error
    state["params"] = model["params"]
    broadcast = trips_of(algorithm)[0].broadcast(state)
    refs = [store.blobs.put(checkpoint.encode(vectors)) for vectors in (state, broadcast)]
    return Start(refs[0], refs[1], checkpoint.digest(model["params"]))


def begin(
    store: CoordinatorStore, records: Records, training: Task, number: int, start: Start | None, lineage: Signed | None
) -> None:
    """Write the task that evaluates the model after a round, if that is due.

    start: from `store_start`. lineage: the signed entry of the round.
    """
    regular = training.evaluation
    if regular is None or start is None:
        return
    store.add_blobs(records, {start.state: False})
    store.add_blobs(records, {start.broadcast: True})
    snapshot = Snapshot(0, start.state.sha256, start.broadcast.sha256, lineage)
    task = regular_task(training, regular, number, snapshot, secrets.token_hex(8), records.at)
    records.add_task(task, f"round {number} of task {training.id} was committed")


_FAILED = Abandon("update-failed")
"""The end of a round whose update raised what no algorithm should."""


class Outcome(NamedTuple):
    """How an attempt at a round ended.

    pause_s: for how many seconds the task must open no other, which is 0 but after failed attempts. left_out: the
    devices that further attempts at the round must not draw, and why. too_stale: assignments that ended with a buffered
    round. successor: the round that takes over those that did not. at_work: which these are, if it was abandoned.
    """

    value: Round
    pause_s: float = 0.0
    left_out: Mapping[str, LeftOut] = {}
    too_stale: Sequence[AssignedDevice] = ()
    successor: OpenRound | None = None
    at_work: AbstractSet[str] | None = None


class _Model(NamedTuple):
    """The blobs of a round's next model, its metrics, and the sealed form of the blobs of a private round.

    losses: how many devices reached each level of loss, where the plan counts them. evaluation: what the model is
    evaluated with, where that is due.
    """

    state: BlobRef
    broadcast: BlobRef
    metrics: dict[str, float]
    losses: LossCounts | None
    sealed: Sequence[SealedBlob]
    evaluation: Start | None


def commit_round(
    membership: Membership, lineage: SigningKey, running: OpenRound, collected: RoundSum, now: float, steps: Histogram
) -> Outcome:
    """Commit the round with the sum of its reports, or abandon it when that is unusable. `steps` observes the times.

    lineage: signs the checkpoint of a task with a release. collected: keeps its noisy sum, so that every try of a
    commit has the same noise: two noisy values of one sum would say more than one. A buffered round has a successor,
    which takes over its open assignments, if the task is active and has more rounds to come.

    A state that is no longer finite also pauses the task: another attempt from the same checkpoint would likely end
    there too, and an operator may go back to an earlier model. So do losses that explode, a server state that cannot be
    read, and an update that fails. When the store fails (the disk is full, say), the round is as it was and can be
    closed later.
    """
    store = membership.store
    try:
        with steps.labels("update").time():
            model = _next_model(store, lineage, running, collected)
    except STORE_FAILURES:
        raise
    except Exception as error:
        return _give_up(membership, running, error, now, collected.noisy)
    with steps.labels("commit").time(), membership.writing() as records:
        task = records.task(running.task.id)
        if task.state.ended:
            return _end(records, running, Abandon("cancelled"), now)
        _add_blobs(store, records, model)
        last = running.number == task.settings.rounds
        trains = store.algorithm(task.algorithm).family not in QUIET  # else its losses do not follow each other
        diverged = "" if last or not trains else why_diverged(records, task, model.metrics, model.losses)
        active = running.task.active and task.state is TaskState.ACTIVE
        goes_on = running.buffered and active and not (last or diverged)
        kept = end_or_keep(records, running, goes_on=goes_on) if running.buffered else HandOver()
        outcome = _end(records, running, kept.event, now)._replace(too_stale=kept.too_stale)
        params = UNSET if model.evaluation is None else model.evaluation.params
        signed = entry(lineage, task, running.base, model.broadcast.sha256, params)
        snapshot = Snapshot(running.number, model.state.sha256, model.broadcast.sha256, signed)
        records.finish_round(running.id, snapshot, model.metrics)
        if goes_on:
            following = open_next(records, replace(running, value=outcome.value), snapshot, now)
            outcome = outcome._replace(successor=following)
        _conclude(records, task, running, collected.noisy, diverged)
        begin(store, records, task, running.number, model.evaluation, signed)
        reach("round.before-commit")
    reach("round.after-commit")
    with suppress(Unavailable):  # the log says why; whoever asks for the model tries again
        for blob in model.sealed:
            store.sealed.open(blob.ref.sha256)
    _LOG.info("round %d of task %s committed %d reports", running.number, task.named, running.value.reported)
    return outcome


def abandon_round(membership: Membership, running: OpenRound, event: Abandon, now: float) -> Outcome:
    """End a round of whose sum a part is lost. Devices at work go on in the next attempt at a buffered one."""
    _LOG.warning("round %d of task %s is abandoned: %s", running.number, running.task.record.named, event.reason)
    with membership.writing() as records:
        active = running.task.active and records.task(running.task.id).state is TaskState.ACTIVE
        if not (running.buffered and active):
            return _end(records, running, event, now)
        value, successor, at_work = begin_again(records, running, event.reason, now)
    return Outcome(value, successor=successor, at_work=at_work)


def _noisy(
    store: CoordinatorStore,
    lineage: SigningKey,
    running: OpenRound,
    collected: RoundSum,
    clip: float,
    total_L: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The sum with the noise of its round, which `collected` keeps from the first try on."""
    if collected.noisy is None:
        with store.database.reading() as records:
            earlier = records.ledger.sources(running.task.id)
        collected.noisy = make_private(running, lineage, earlier, clip, total_L)
    return collected.noisy.total


def _conclude(records: Records, task: Task, running: OpenRound, private: PrivateSum | None, diverged: str) -> None:
    """Write the ledger's row of a private round; complete the task where there is no next, pause one that diverged."""
    no_budget = None if private is None else write_row(records, task, private)
    if running.number == task.settings.rounds:
        records.move_task(task, TaskState.COMPLETED, "its last round was committed")
    elif no_budget is not None:
        records.move_task(task, TaskState.COMPLETED, BUDGET_SPENT, no_budget)
    elif diverged:
        pause_diverged(records, task, running.number, diverged)


def _state_before(store: CoordinatorStore, running: OpenRound, algorithm: Algorithm) -> Vectors:
    """The server state that a round starts from. Raises UnreadableBlob."""
    try:
        return checkpoint.decode(store.blobs.get(running.base.state_sha256), state_specs(running.plan, algorithm))
    except (UnknownBlob, FedcoreError) as error:
        raise UnreadableBlob(f"the server state before round {running.number}: {error}") from error


def _decoded(running: OpenRound, reports: ReportSum | KeptReports) -> NDArray[np.float64]:
    """The sum of a round's reports, with the codecs of its plan undone, and within its bounds."""
    layout, devices = running.plan.report, running.value.reported
    return held_sum(running.task.settings, layout, layout.decode(reports.total(), running.codec_key), devices)


def _next_model(store: CoordinatorStore, lineage: SigningKey, running: OpenRound, collected: RoundSum) -> _Model:
    """The next model, from the reports' sum and its noise. Raises ReportError, NonFiniteState or UnreadableBlob."""
    plan, devices = running.plan, running.value.reported
    algorithm = store.algorithm(running.task.record.algorithm)
    trip, following = (in_turn(trips_of(algorithm), number) for number in (running.number, running.number + 1))
    state, total_L = _state_before(store, running, algorithm), _decoded(running, collected.reports)
    if running.task.settings.privacy is not None:
        total_L = _noisy(store, lineage, running, collected, clip_of(trip, state), total_L)
    lr_scale = running.task.settings.schedule.lr_scale(running.number, devices)
    discounted = discount(running.value.staleness)
    participation = devices / (running.task.settings.clients or devices)
    server_step = ServerStep(devices, plan.schema.layers, lr_scale, participation, discounted)
    aggregated = aggregate(plan.report.decoded, trip, state, total_L, server_step, following)
    # Files first: a row must never point at a blob that is not there.
    files = [checkpoint.encode(vectors) for vectors in (aggregated.state, aggregated.broadcast)]
    private = collected.noisy
    sealed = [] if private is None else [store.sealed.put(private.secret, data) for data in files]
    refs = [blob.ref for blob in sealed] or [store.blobs.put(data) for data in files]
    evaluation = store_start(store, running.task.record, running.number, aggregated.broadcast)
    losses = None if aggregated.losses is None else LossCounts(aggregated.losses, devices)
    return _Model(refs[0], refs[1], aggregated.metrics, losses, sealed, evaluation)


def _add_blobs(store: CoordinatorStore, records: Records, model: _Model) -> None:
    """Make the blobs of a model known: of a private one the sealed forms, which are there, with their keys."""
    if not model.sealed:
        store.add_blobs(records, {model.state: False})
        store.add_blobs(records, {model.broadcast: True})
        return
    store.add_blobs(records, {blob.sealed: False for blob in model.sealed})
    records.add_blob(model.state, public=False)
    records.add_blob(model.broadcast, public=True)
    for blob in model.sealed:
        records.sealed.add(blob)


def _give_up(
    membership: Membership, running: OpenRound, error: Exception, now: float, private: PrivateSum | None
) -> Outcome:
    """Abandon a round that has no next model, and say why: not before what is said of a noisy sum has its row."""
    abandoned = _abandon(membership, running, error, now, private)
    reason, named = abandoned.value.reason, running.task.record.named
    defect = error if reason == _FAILED.reason else None
    _LOG.warning("round %d of task %s has no next model, %s: %s", running.number, named, reason, error, exc_info=defect)
    return abandoned


def _abandon(
    membership: Membership,
    running: OpenRound,
    error: Exception,
    now: float,
    private: PrivateSum | None,
) -> Outcome:
    """End the round without a next model. An unusable sum is a failed attempt; the other causes pause the task.

    That a noisy sum led to no state, or none that is finite, says something of it, so it is spent, and a private task
    ends.
    """
    number, event = running.number, _cause(error)
    with membership.writing() as records:
        outcome, task = _end(records, running, event, now), records.task(running.task.id)
        words = f"round {number}: {repr(error) if event == _FAILED else error}"
        if private is not None and not isinstance(error, ReportError | UnreadableBlob):
            write_row(records, task, private)
            if not task.state.ended:
                records.move_task(task, TaskState.CANCELLED, event.reason, words)
            return outcome
        if isinstance(error, ReportError):
            return outcome._replace(pause_s=note_failure(records, running, event.reason))
        if task.state is TaskState.ACTIVE and isinstance(error, UnreadableBlob):
            pause_unreadable(records, task, str(error))
        elif task.state is TaskState.ACTIVE:
            records.move_task(task, TaskState.PAUSED, event.reason, words)
    return outcome


def _cause(error: Exception) -> Abandon:
    match error:
        case ReportError():
            return Abandon("invalid-aggregate")
        case UnreadableBlob():
            return Abandon("blob-unreadable")
        case NonFiniteState():
            return Abandon("non-finite-state")
    return _FAILED


def _end(records: Records, running: OpenRound, event: Aggregated | Abandon, now: float) -> Outcome:
    """Write how the round ended and, of an attempt that came to nothing, which devices revealed shares in it."""
    value, effects = running.after(event, now)
    records.move_round(running.id, running.value, value, value.reason or "aggregated")
    for effect in effects:
        if isinstance(effect, EndAssignments):
            records.end_assignments(running.task.id, running.numbers, effect.state, value.reason)
    if running.secure is None or value.state is RoundState.COMMITTED:
        return Outcome(value)
    return Outcome(value, left_out=records.leave_out(running.secure.left_out))
