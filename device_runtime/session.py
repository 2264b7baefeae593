"""One session: check in, wait to be selected, do the work, upload once. Spec: docs/spec/wire.md.

A device that was killed finds its last assignment in the state folder (state/assignment.py), and first finishes that.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from device_runtime import errors
from device_runtime.backends import unsupported
from device_runtime.capabilities import capabilities, stated_examples
from device_runtime.conditions import Clock, Conditions, Moment
from device_runtime.config import DeviceConfig, enrolments, sealer_of
from device_runtime.errors import Outcome, Phases, failed
from device_runtime.examples import ExampleSource, open_examples
from device_runtime.monitor import Hold, Monitor, SessionRecord
from device_runtime.permission.guard import Guard, acceptable_tasks
from device_runtime.permission.policy import Releases, policy_in
from device_runtime.protocol.transport import Transport
from device_runtime.state.assignment import AssignmentStore, KeptVectors, StoredAssignment
from device_runtime.state.database import StateDatabase, open_database
from device_runtime.state.folder import BLOBS, BlobCache, PartialDownload, only_session, trim
from device_runtime.state.records import AnsweredQuestions, Journal, Retry, Spending, Spent, kept_blobs, stated_versions
from device_runtime.trainer import Trainer
from device_runtime.work import Worker, encode_report, plan_of
from fedcore.errors import visible
from fedcore.plan import BlobRef
from fedcore.wire.messages import MOST_TASKS, Abort, AbortReason, Assignment, CheckIn, Rejected, RetryWindow

if TYPE_CHECKING:
    from device_runtime.protocol.secure import SecureDelivery

# Answers to an upload that leave no assignment to give up: unknown, decided, too late.
OVER = frozenset({404, 409, 410})
OWN_FAULT = "the device's own code failed"


def run_session(config: DeviceConfig, clock: Clock | None = None) -> Outcome:
    """Run one session. Errors are in the outcome, and the coordinator is told if it was waiting.

    When the process is told to end (KeyboardInterrupt, SystemExit), the coordinator is told and the exception
    propagates.
    """
    started, phases = time.monotonic(), Phases()
    clock = clock or Clock()
    outcome = Outcome()
    try:
        with (
            only_session(config.state),
            open_database(config.state, clock) as database,
            config.connect(config.coordinator) as transport,
        ):
            transport.stopping, transport.wall = config.stopping, clock.wall
            outcome = _Session(config, transport, database, clock, phases).run()
    except errors.DeviceError as error:
        outcome = failed(outcome, error)
    seconds = time.monotonic() - started
    return replace(outcome, seconds=seconds, phases=phases.stop(), arch=platform.machine(), backend=config.backend)


class _Session:
    """One pass through the protocol."""

    def __init__(
        self, config: DeviceConfig, transport: Transport, database: StateDatabase, clock: Clock, phases: Phases
    ) -> None:
        self._config = config
        self._phase = phases
        self._transport = transport
        self._database = database
        self._clock = clock
        self._after_work: RetryWindow | None = None
        self._min_examples: dict[str, int] = {}
        sealer = sealer_of(config)
        self._assignments = AssignmentStore(database, config.state, sealer, config.coordinator, config.population)
        self._retry = Retry(database, config.coordinator, config.population)
        self._kept = KeptVectors(database, sealer, clock, config.coordinator, config.population)
        self._policy = config.policy or policy_in(config.state)
        self._enrolments = transport.identity = enrolments(config, self._policy, database, sealer, clock)
        journal, self._spending = Journal(database, clock), Spending(database, clock)
        self._answers = AnsweredQuestions(database, clock)
        self._trainer: Trainer | None = None
        releases = Releases(self._policy, database, clock, config.population)
        self._guard = Guard(self._policy, self._spending, releases, timer=self._cpu_s)
        self._record = SessionRecord(journal, self._spending, transport, config.coordinator, config.population)
        self._monitor = Monitor(config, clock, self._guard, self._record)

    def run(self) -> Outcome:
        """Everything from the conditions to the receipt."""
        try:
            if self._database.notice:
                self._record.notice("state-replaced", self._database.notice)
            self._record.note(device=self._enrolments.device)
            now = self._monitor.conditions()
            if unmet := self._config.unmet(now):
                self._record.note(outcome="not-now", reason="conditions", detail="; ".join(unmet))
            else:
                self._guard.check_address(self._config.coordinator)
                if not self._finish_earlier():
                    self._take_part(now)
            trim(self._config.state / BLOBS, self._policy.cache_bytes, kept_blobs(self._database))
        except errors.StateDamaged:
            raise  # nothing can be stored any more
        except errors.PolicyForbids as error:
            self._record.fail(error)
            self._record.note(outcome="not-now")
        except errors.DeviceError as error:
            self._record.fail(error)
        except errors.STOPS:
            self._record.close(outcome="stopped")
            raise
        return self._record.close()

    def _finish_earlier(self) -> bool:
        """Finish the assignment that a killed process left, or give it up. True if that was this session's work."""
        self._assignments.sweep()
        if (stored := self._assignments.get()) is None or stored.phase == "uploaded":
            return False
        try:
            return self._finish(self._assignments.carried_over(stored, self._clock))
        except errors.DeviceError:
            raise
        except Exception as error:
            self._give_up(stored.given, errors.RuntimeFailed(OWN_FAULT, type(error).__name__))
            return True  # else every later session would fail in the same way

    def _finish(self, stored: StoredAssignment) -> bool:
        if not stored.due.remaining_s(self._clock):
            self._assignments.drop()
            place = f"round {stored.given.round} of task {stored.given.task}"
            self._record.notice(
                "dropped", f"{place} was left {stored.phase} when the device stopped, and is over by now"
            )
            return False
        try:
            sizes = self._assignments.size(stored), self._answers.within_a_week()
            self._guard.check_stored(self._config.population, stored, *sizes)
        except (errors.PlanRefused, errors.PolicyForbids) as error:
            # The coordinator is not told: a population that is no longer allowed must not hear from this device.
            self._assignments.drop()
            self._record.notice("dropped", f"what an earlier session left {stored.phase} is {error.detail}: not sent")
            return False
        self._note_assignment(stored.given)
        if stored.phase == "assigned":
            # It is not trained again, because this work may have been what stopped the device.
            self._give_up(stored.given, errors.RuntimeFailed("the device was stopped while it worked"))
        else:
            self._record.note(examples=stored.examples, steps=stored.steps)
            self._record.know(question=stored.question, numbers=stored.numbers)
            with Hold(self._transport, stored.given) as self._monitor.hold:
                self._deliver(stored)
        return True

    def _take_part(self, now: Conditions) -> None:
        config, transport = self._config, self._transport
        self._trainer = trainer = config.trainer(config.backend)
        self._guard.check_in(config.population, trainer.format)
        examples = open_examples(config.examples, config.keystore)
        models, refused = stated_versions(self._database, config.population)
        hello = CheckIn(
            capabilities=capabilities(trainer),
            examples=stated_examples(self._guard.visible(examples.counts())),
            conditions=now.stated(),
            models=models or UNSET,
            refused=refused or UNSET,
            token=self._retry.token() or UNSET,
            labels=self._guard.told(config.labels) or UNSET,
        )
        unsettled = self._kept.settle_all(transport.outcome)
        with self._phase("wait"):
            answer = transport.check_in(config.population, hello)
        self._record.note(device=self._enrolments.device)
        if isinstance(answer, Rejected):
            return self._rejected(answer, trainer)
        willing = acceptable_tasks(answer.offers, examples, now, self._guard.shows)
        tasks = tuple(task for task in willing if task not in unsettled)[:MOST_TASKS]
        if not tasks:
            self._record.note(detail="; ".join(unsettled[task] for task in willing))
            # The coordinator is not told: the finding may be private, and silence looks like a lost connection.
            return self._record.note(outcome="rejected", reason="unwilling", retry=answer.retry, retryable="transient")
        self._after_work = answer.retry
        self._min_examples = {offer.task: offer.min_examples for offer in answer.offers}
        with self._phase("wait"):
            assignment = transport.await_assignment(answer.session, config.wait_s, tasks)
        if isinstance(assignment, Rejected):
            return self._rejected(assignment, trainer)
        return self._work(assignment, trainer, examples)

    def _work(self, assignment: Assignment, trainer: Trainer, examples: ExampleSource) -> None:
        """Carry out the assignment, and hold it meanwhile."""
        due = Moment.after(assignment.report_within_s, self._clock)
        if (last := self._assignments.get()) is not None and last.given.assignment == assignment.assignment:
            raise errors.BadAnswer(f"assignment {assignment.assignment} came again after its report was counted")
        self._note_assignment(assignment)
        with Hold(self._transport, assignment) as self._monitor.hold:
            self._carry_out(assignment, due, trainer, examples)

    def _carry_out(self, assignment: Assignment, due: Moment, trainer: Trainer, examples: ExampleSource) -> None:
        """Train and deliver, or tell the coordinator why not."""
        try:
            stored = self._train(assignment, due, trainer, examples)
        except errors.DeviceError as error:
            self._give_up(assignment, error)
        except Exception as error:
            # A fault of this runtime, or of the application: the round must not wait for this device.
            self._give_up(assignment, errors.RuntimeFailed(OWN_FAULT, type(error).__name__))
            raise
        except errors.STOPS:
            with contextlib.suppress(errors.TransportError):
                self._transport.leave(assignment.assignment, Abort("conditions"))
            self._assignments.drop()
            raise
        else:
            self._deliver(stored)

    def _train(
        self, assignment: Assignment, due: Moment, trainer: Trainer, examples: ExampleSource
    ) -> StoredAssignment:
        """Train, and store the report. The journal always knows the progress."""
        record = self._record
        with self._database.transaction():
            stored = self._assignments.assigned(assignment, due)
            self._spending.add(Spent(sessions=1))
            record.write()

        def watch() -> None:
            if not self._monitor.keep_going(due):
                raise errors.DeadlinePassed("stopped before training: the report would come too late")

        worker = Worker(
            trainer,
            examples,
            self._cache(watch),
            lambda: self._monitor.keep_going(due),
            self._min_examples.get(assignment.task, 0),
        )
        self._guard.check_assignment(assignment, self._transport.bytes_moved)
        plan = worker.plan(assignment)
        question = None if plan.question is UNSET else visible(" ".join(plan.question.split()))
        record.write(plan=errors.plain(plan.name), question=question)
        self._guard.check_question(question, self._answers.within_a_week())
        to_move = self._transport.bytes_moved + worker.to_move(assignment, plan)
        kept = self._kept.of(assignment, plan) if plan.kept else None
        others_bytes = self._kept.bytes_besides(assignment.task) if plan.kept else 0
        received_bytes = assignment.plan.size + assignment.checkpoint.size
        sizes = {"received_bytes": received_bytes, "to_move": to_move, "kept_bytes": others_bytes}
        self._guard.check_cache(worker.to_cache(assignment, plan))
        self._guard.check_plan(plan, trainer.format, examples.count, **sizes)
        if assignment.secagg is not None:
            self._secure(due).check(assignment, plan.report)
        try:
            with self._phase("train"):
                result = worker.train(assignment, plan, self._guard.limits(), kept)
        finally:
            record.know(compute_s=self._guard.seconds)
        record.note(examples=result.examples, steps=result.steps, cut=result.cut)
        with self._database.transaction():
            made_of = {"collection": plan.examples.collection, "examples": result.examples, "steps": result.steps}
            made_of |= {"question": question, "numbers": plan.report.size}
            stored = self._assignments.trained(replace(stored, **made_of), encode_report(assignment, plan, result))
            if question is not None:
                self._answers.count()
            if plan.kept:
                self._kept.put(assignment, result.kept)
            record.write(numbers=plan.report.size)
        return stored

    def _cache(self, watch: Callable[[], None]) -> BlobCache:
        def fetch(ref: BlobRef, part: PartialDownload) -> None:
            with self._phase("fetch"):
                self._transport.blob(ref, part, watch)

        def fetch_delta(ref: BlobRef, base: str) -> bytes | None:
            with self._phase("fetch"):
                return self._transport.delta(ref, base, watch)

        return BlobCache(self._config.state / BLOBS, fetch, fetch_delta, kept_blobs(self._database))

    def _deliver(self, stored: StoredAssignment) -> None:
        """Send the stored report. It stays stored until its receipt has arrived, unless it is no longer needed."""
        try:
            if stored.given.secagg is None:
                self._send(stored)
            else:
                stored = self._send_masked(stored)
        except errors.DeviceError as error:
            over = isinstance(error, errors.ReportLost | errors.AssignmentError) or (
                isinstance(error, errors.Refused) and error.final
            )
            if over:
                return self._give_up(stored.given, error)
            self._record.fail(error)
            return self._record.notice("kept", "the report is kept; the next session sends it if there is time left")
        except Exception as error:
            return self._give_up(stored.given, errors.RuntimeFailed(OWN_FAULT, type(error).__name__))
        self._record.note(outcome="reported", retry=self._after_work)
        try:
            with self._database.transaction():
                self._record.write(receipt=stored.sha256)
                self._assignments.uploaded(stored)
            self._assignments.sweep()
        except errors.StateError as error:
            self._record.notice("kept", f"the receipt could not be written down: {error.detail}")

    def _send(self, stored: StoredAssignment) -> None:
        with self._phase("upload"):
            if stored.given.over_selected and self._monitor.hold is not None:
                self._monitor.hold.ask()
            receipt = self._transport.report(stored.given.assignment, self._assignments.report(stored), stored.sha256)
        if receipt.sha256 != stored.sha256:
            raise errors.BadAnswer("the receipt is for another report")

    def _send_masked(self, stored: StoredAssignment) -> StoredAssignment:
        """Take part in the secure aggregation to its end."""
        with self._phase("mask"):
            stored, result, message = self._secure(stored.due).run(stored)
        self._record.know(result=message.hex())
        if not result.summed:
            raise errors.SumAbandoned("the secure aggregation ended without a sum")
        return stored

    def _secure(self, due: Moment) -> SecureDelivery:
        from device_runtime.protocol.secure import AnsweredRounds, SecureDelivery  # rarely needed

        return SecureDelivery(
            enrolments=self._enrolments,
            answered=AnsweredRounds(self._database, self._config.coordinator),
            transport=self._transport,
            assignments=self._assignments,
            least=self._guard.min_cohort,
            keep_going=lambda: self._monitor.keep_going(due),
            phase=self._phase,
            plan=lambda assignment: plan_of(assignment, self._cache(lambda: None)),
        )

    def _give_up(self, assignment: Assignment, error: errors.DeviceError) -> None:
        """End an assignment without a report, and say why."""
        self._record.fail(error)
        reason: AbortReason = "runtime-failed"
        if isinstance(error, errors.AssignmentError):
            self._record.note(outcome="aborted")
            reason = error.reason
        if not (isinstance(error, errors.Refused) and error.status in OVER):
            # The outcome keeps the first failure. A coordinator that hears nothing has its own deadline.
            with contextlib.suppress(errors.TransportError):
                # Without details, as they may depend on the examples.
                self._transport.abort(assignment.assignment, Abort(reason))
        self._assignments.drop()

    def _cpu_s(self) -> float:
        """CPU seconds of this process and of its training processes."""
        return time.process_time() + (self._trainer.cpu_s if self._trainer else 0.0)

    def _rejected(self, answer: Rejected, trainer: Trainer) -> None:
        self._retry.keep_token(answer.token)
        self._record.note(outcome="rejected", reason=answer.reason, retry=answer.retry, retryable="transient")
        if answer.reason == "unsupported-format":
            # Only another backend or another task helps. The window stays: when tasks change, the coordinator knows.
            self._record.note(detail=unsupported(trainer.format, answer.formats), retryable="permanent")

    def _note_assignment(self, assignment: Assignment) -> None:
        numbers = {"round": assignment.round, "attempt": assignment.attempt, "slot": assignment.slot}
        self._record.note(task=assignment.task, target=visible(assignment.target or ""), **numbers)
        told = {"purpose": errors.plain(assignment.purpose or ""), "masked": assignment.secagg is not None}
        self._record.know(assignment=assignment.assignment, plan_sha256=assignment.plan.sha256, **told)
