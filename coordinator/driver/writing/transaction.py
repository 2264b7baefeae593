"""Transaction: the changes of the rounds that one turn of the driver commits together.

A `Transaction` writes rows as it goes, and collects the effects that memory must take over. Memory stays as it is until
the driver has committed. When the commit fails the transaction is dropped, and nothing happened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from coordinator import errors
from coordinator.commands import AbortAssignment, CountReport, DurableCommand, TakeShare
from coordinator.driver.memory.open_rounds import LoadedTask, OpenRound, OpenRounds
from coordinator.driver.memory.round_sums import SharedSums
from coordinator.driver.memory.selector import Selector
from coordinator.driver.memory.sessions import Session
from coordinator.driver.writing import commit_round, make_assignments
from coordinator.driver.writing.make_assignments import (
    DEFERRED,
    AssignmentEnded,
    CountedReports,
    Deferred,
    DevicesDrawn,
    DevicesTurnedAway,
    Effect,
    ReportsCounted,
    RoundMoved,
    SharedReportsCounted,
    SumHandedOver,
)
from coordinator.rules import rounds as round_rules
from coordinator.rules.buffers import refusal
from coordinator.rules.entities import AssignedDevice, AssignmentRecord
from coordinator.rules.replicas import SharedRound
from coordinator.rules.rounds import Effect as RoundEffect
from coordinator.rules.states import AssignmentState, LeftOut, RoundState, TaskState
from coordinator.store.records.records import Records
from fedcore.wire.messages import Receipt


class Transaction:
    """One transaction in the making: its changed `rounds`, and its `effects` in the order in which they came about."""

    def __init__(
        self, records: Records, selector: Selector, rounds: OpenRounds, shared: SharedSums, now: float
    ) -> None:
        self._records = records
        self._selector = selector
        self._shared = shared
        self._now = now
        self.rounds = rounds.copy()
        self.effects: list[Effect] = []
        self._drawn: set[str] = set()
        """Sessions that were given an assignment."""
        self._assignments: dict[str, AssignmentRecord] = {}
        self._counted = CountedReports(records)
        self._buffers = make_assignments.OpenBuffers(records)

    @property
    def durable_steps(self) -> list[str]:
        """The durable steps in this transaction, by the names of failpoints."""
        kinds = {type(effect) for effect in self.effects}
        steps = {"assignment": DevicesDrawn, "report": ReportsCounted, "receipt": SharedReportsCounted}
        return [name for name, kind in steps.items() if kind in kinds]

    def take(self, commands: Sequence[DurableCommand]) -> list[Receipt | errors.Refusal | Deferred | None]:
        """The answers to devices that report or give up, one after the other; rows are read and written together.

        DEFERRED for a report to a buffered round that has its reports, and is not committed yet.
        """
        about = {command.assignment for command in commands if not isinstance(command, TakeShare)}
        self._assignments = self._records.assignments(about)
        answers = [self._answer(command) for command in commands]
        self.effects += self._counted.write(self.rounds)
        return answers

    def lose(self, lost: Mapping[int, Collection[str]]) -> None:
        """Go on without lost devices whose assignments are still open; by round. Secure rounds do so in `advance`."""
        for round_ in list(self.rounds.running.values()):
            if round_.id in lost and not round_.value.closed and round_.secure is None:
                self._go_on_without(round_, lost[round_.id], AssignmentState.LOST)

    def advance(self, task_id: str, task: LoadedTask | None) -> None:
        """Open, move or end a task's rounds, as time and the waiting devices ask; with None the task is over."""
        for rounds in (self.rounds.running, self.rounds.held):
            if task_id in rounds:
                self._advance(rounds[task_id], task)
        if task is not None and self._may_open(task):
            self._advance(make_assignments.open_round_of(self._records, self.rounds, task, self._now), task)

    # --- reports, and devices that give up

    def _answer(self, command: DurableCommand) -> Receipt | errors.Refusal | Deferred | None:
        try:
            match command:
                case CountReport():
                    return self._count(command)
                case TakeShare():
                    self._hear(command)
                case AbortAssignment():
                    self._abort(command)
        except errors.Refusal as refused:
            return refused
        return None

    def _count(self, command: CountReport) -> Receipt | Deferred:
        """Count a report, once. Raises UnknownAssignment, ConflictingReport, NoLongerNeeded or InvalidReport."""
        record = self._assignment(command.assignment)
        receipt = Receipt(assignment=record.id, task=record.task, round=record.number, sha256=command.sha256)
        if record.report_sha256 == command.sha256:
            return receipt
        if record.report_sha256 is not None:
            raise errors.ConflictingReport(
                f"a report with digest {record.report_sha256[:12]}… was accepted; this one is another"
            )
        if record.state is AssignmentState.REPORTED:  # since its row was read, at another replica
            raise errors.Unavailable("a report of this assignment is being counted elsewhere; send it again")
        if command.shared is not None:
            return receipt if self._count_shared(command.shared, record, command) else DEFERRED
        round_ = self._reporting_round(record)
        if round_.secure is not None:
            raise errors.InvalidReport("this round takes only masked reports, as messages of its secure aggregation")
        if not round_.reporting:
            return DEFERRED
        if round_.buffered:
            round_ = replace(round_, devices=round_.devices | {record.device})
        staleness = self._counted.add(round_, record, command)
        self._note(record, command)
        self._end(round_, record, AssignmentState.REPORTED)
        self._step(round_, round_rules.Reported(staleness))
        return receipt

    def _count_shared(self, shared: SharedRound, record: AssignmentRecord, command: CountReport) -> bool:
        """Count a report for the driver of its round. That ends its assignments once it takes no more.

        False for a report to a buffered round that has its reports, and is not committed yet. Raises NoLongerNeeded;
        Unavailable once the sum of the round is being handed over.
        """
        if record.state is not AssignmentState.ASSIGNED:
            raise refusal(record.state)
        into = self._buffers.of(shared, record) if shared.buffered else (shared, 0)
        if self._shared.leaving if into is None else self._shared.closed(into[0].id):
            raise errors.Unavailable("this replica hands its sum of the round over; send the report again")
        if into is not None:
            self._counted.add_shared(into[0], record, command, into[1])
            self._note(record, command)
        return into is not None

    def _note(self, record: AssignmentRecord, command: CountReport) -> None:
        reported = replace(record, state=AssignmentState.REPORTED, report_sha256=command.sha256)
        self._assignments[record.id] = reported

    def _hear(self, command: TakeShare) -> None:
        """Count the reports that another replica took, each once; nothing of a round that is over.

        Raises MalformedMessage for a sum that has not the layout of the round.
        """
        share, replica = command.share, command.replica
        round_ = next((one for one in self.rounds.running.values() if one.id == share.round), None)
        if round_ is None:
            return
        if command.total is not None and share.size != round_.plan.report.size:
            raise errors.MalformedMessage(
                f"a sum of {share.size} values is none of a round of {round_.plan.report.size}"
            )
        known = round_.told.get(replica, 0)
        for one in (new := share.counted[max(0, known - share.before) :]):
            self._end(round_, AssignedDevice(one.assignment, 0, one.device), AssignmentState.REPORTED)
        if new:
            devices = round_.devices.union(one.device for one in new)
            round_ = replace(round_, told={**round_.told, replica: known + len(new)}, devices=devices)
            self._step(round_, round_rules.ReportsElsewhere(tuple(one.staleness for one in new)))
        if command.total is not None:
            self.effects.append(SumHandedOver(round_, replica, share.before + len(share.counted), command.total))

    def _abort(self, command: AbortAssignment) -> None:
        """End an assignment; one that ended without a report stays as it is.

        Raises UnknownAssignment, or ConflictingReport when the report was counted already.
        """
        record, reason = self._assignment(command.assignment), command.message.reason
        if record.state is AssignmentState.REPORTED:
            raise errors.ConflictingReport("this assignment's report was accepted; it cannot be given up any more")
        with suppress(errors.NoLongerNeeded):
            round_ = self._reporting_round(record)
            if round_.secure is not None and record.id in round_.secure.masked:
                raise errors.ConflictingReport(
                    "this assignment's masked report was taken; it cannot be given up any more"
                )
            self._records.move_assignment(record, AssignmentState.ABORTED, "device", reason)
            self._assignments[record.id] = replace(record, state=AssignmentState.ABORTED)
            self._end(round_, record, AssignmentState.ABORTED, reason)
            if reason == LeftOut.REVEALED.value:
                self.rounds.leave_out(record.task, {record.device: LeftOut.REVEALED})
            noted, again = commit_round.note_failing(round_, [record.device], self.rounds)
            self._step(noted, round_rules.Aborted(again=again > 0))

    def _assignment(self, id_: str) -> AssignmentRecord:
        record = self._assignments.get(id_)
        if record is None:
            raise errors.UnknownAssignment("there is no such assignment; check in again")
        return record

    def _reporting_round(self, record: AssignmentRecord) -> OpenRound:
        """The round that still waits for the report of an assignment; a buffered one may have reached its goal.

        Raises NoLongerNeeded.
        """
        round_ = self.rounds.running.get(record.task)
        if round_ is None or record.state is not AssignmentState.ASSIGNED:
            raise refusal(record.state)
        if round_.buffered:
            if self._selector.sessions.is_late(round_.task.population, record.device, self._now):
                raise errors.NoLongerNeeded("the deadline of the assignment has passed")
            return round_
        if round_.id != record.round:
            raise refusal(record.state)
        if not round_.reporting or self._now >= round_.value.deadline:
            raise errors.NoLongerNeeded(f"round {record.number} has what it needs, or its deadline has passed")
        return round_

    def _end(
        self, round_: OpenRound, assignment: AssignmentRecord | AssignedDevice, state: AssignmentState, reason: str = ""
    ) -> None:
        task = round_.task
        if state is AssignmentState.REPORTED:
            self.rounds.note_report(task.id, assignment.device)
        self.effects.append(AssignmentEnded(assignment.id, assignment.device, task.population, task.id, state, reason))

    def _end_some(self, round_: OpenRound, names: Collection[str], state: AssignmentState, cause: str) -> list[str]:
        """End those of these assignments that are open; answers their devices."""
        ended = self._records.end_assignments(round_.task.id, round_.numbers, state, cause, names)
        for assignment in ended:
            self._end(round_, assignment, state)
        return [assignment.device for assignment in ended]

    def _go_on_without(self, round_: OpenRound, names: Collection[str], how: AssignmentState) -> None:
        """End those of these assignments that are open, and step a round without their devices."""
        late = how is AssignmentState.EXPIRED
        ended = self._end_some(round_, names, how, "deadline passed" if late else "not heard of")
        if round_.shared and len(ended) < len(names):
            self.rounds.put(round_ := round_.doubted(self._now))
        if ended:
            noted, again = commit_round.note_failing(round_, ended, self.rounds, late=late)
            proven = round_.secure is not None and round_.secure.proven
            self._step(
                noted, round_rules.Expired(len(ended), again) if late else round_rules.Lost(len(ended), proven, again)
            )

    # --- rounds

    def _advance(self, round_: OpenRound, task: LoadedTask | None) -> None:
        missing = self._selector.missing(round_, self._now)
        for state in (AssignmentState.EXPIRED, AssignmentState.LOST):  # the first ends no secure round
            if names := [name for name, how in missing.items() if how is state]:
                self._go_on_without(round_, names, state)
                if round_.task.id not in self.rounds.running:
                    return
                round_ = self.rounds.running[round_.task.id]
        if task is not None and (round_.value.state is RoundState.SELECTING or round_.draws_more(self._now)):
            task = make_assignments.as_it_stands(self._records, task)
        event = self.rounds.next_event(round_, task, self._candidates, self._now)
        if isinstance(event, round_rules.Summed) and event.devices:
            self._count_masked(round_)
        if isinstance(event, round_rules.Tick) and not round_.buffered and self._now >= round_.value.deadline:
            open_ = self._records.cohorts.at_work(round_.task.id, round_.numbers)
            event = round_rules.Tick(
                commit_round.note_failing(round_, [device.device for device in open_], self.rounds)[1]
            )
        self._step(round_, event)

    def _count_masked(self, round_: OpenRound) -> None:
        """Count every masked report that is in the sum which came out."""
        if round_.secure is not None:
            digests = {assignment: (round_.id, sha256) for assignment, sha256 in round_.secure.uploads.items()}
            self._records.add_reports(digests)
            for record in self._records.assignments(digests).values():
                self._end(round_, record, AssignmentState.REPORTED)
            total = round_.secure.total(round_.plan.report)
            self.effects.append(ReportsCounted(round_, [total]))

    def _may_open(self, task: LoadedTask) -> bool:
        wanted = self.rounds.may_open(task, self._now) and bool(
            self._not_drawn(self._selector.eligible(task, self.rounds, self._now))
        )
        record = self._records.task(task.id) if wanted else None
        if record is None or record.state is not TaskState.ACTIVE:
            return False
        if task.settings.secagg is not None and self._selector.secure.authority is None:
            commit_round.pause_without_authority(self._records, record)
            return False
        return True

    def _step(self, round_: OpenRound, event: round_rules.Event) -> None:
        value, effects = round_.after(event, self._now)
        if (value, effects) == (round_.value, ()):
            return
        if isinstance(event, round_rules.Reported) and value.state is round_.value.state and not effects:
            # Many in a turn: their rows are written together, before anything else of the round is.
            self._counted.move(round_)
            self.rounds.put(replace(round_, value=value))
            return
        self.effects += self._counted.write(self.rounds)
        if round_rules.Release() in effects:
            round_ = self._release(round_)
        cause = value.reason or type(event).__name__.lower()
        self._records.move_round(round_.id, round_.value, value, cause)
        self.effects.append(RoundMoved(round_, value))
        goes_on = value.state is round_.value.state and value.revealed is round_.value.revealed
        after = replace(round_, value=value, entered_at=round_.entered_at if goes_on else self._now)
        self.rounds.put(after)
        if after.buffered and round_.reporting and value.state is RoundState.AGGREGATING:
            # Of whoever is at work no replica counts a report into this buffer from now on.
            self._records.cohorts.at_work(after.task.id, after.numbers)
        if value.state is RoundState.ABANDONED and after.secure is not None:
            self.rounds.leave_out(after.task.id, self._records.leave_out(after.secure.left_out))
        if value.reason in round_rules.FAILURES:
            self.rounds.not_before[after.task.id] = self._now + commit_round.note_failure(
                self._records, after, value.reason
            )
        self._do(effects, after, cause)

    def _do(self, effects: Sequence[RoundEffect], after: OpenRound, cause: str) -> None:
        """Do what a step of a round asks for."""
        for effect in effects:
            match effect:
                case round_rules.Select(count):
                    self._draw(after, count)
                case round_rules.TurnAway():
                    self.effects.append(DevicesTurnedAway(self._candidates(after)))
                case round_rules.BeginPairAgain():
                    commit_round.begin_pair_again(self._records, after.task.record, self._selector.secure.lineage)
                case round_rules.EndAssignments(state):
                    open_ = self._records.end_assignments(after.task.id, after.numbers, state, cause)
                    late = [device.device for device in open_ if state is AssignmentState.EXPIRED]
                    if cause in round_rules.HELD_UP and not after.buffered:
                        self.rounds.note_unreliable(after.task.id, after.failing.union(late))

    def _release(self, round_: OpenRound) -> OpenRound:
        base = self._records.snapshot(round_.task.record)
        attempt = self._records.release_round(round_.id, round_.task.id, base.number + 1)
        return replace(round_, base=base, attempt=attempt, entered_at=self._now)

    # --- devices

    def _draw(self, round_: OpenRound, count: int) -> None:
        """Draw devices, a cohort or some that are missing of it, and give them their assignments."""
        unreliable = self.rounds.unreliable.get(round_.task.id, {})
        chosen, first = self._selector.draw(self._candidates(round_), count, unreliable), round_.value.assigned
        new = make_assignments.assigned_devices(self._selector, round_, [session.device for session in chosen], first)
        self._records.add_assignments(round_.id, new)
        if not round_.buffered:
            round_ = replace(round_, devices=round_.devices.union(device.device for device in new))
        self._step(round_, round_rules.Configured(len(new)))
        if round_.task.id not in self.rounds.running:
            return  # its deadline was too short for the clock to tell, and has passed
        round_ = self.rounds.running[round_.task.id]
        common = make_assignments.common_part(self._records, round_, self._selector.secure.lineage, self._now)
        if round_.task.settings.secagg is not None and round_.secure is None:
            round_ = make_assignments.invite(self._selector.secure, round_, common, new, self._records.at)
            self.rounds.put(round_)
        if round_.secure is not None:
            common = replace(common, secagg=round_.secure.invitation, server=round_.secure.server)
        self._drawn.update(session.id for session in chosen)
        pairs = [
            (session, make_assignments.for_device(common, device)) for session, device in zip(chosen, new, strict=True)
        ]
        self.effects.append(DevicesDrawn(round_, pairs, self._now + common.report_within_s))

    def _candidates(self, round_: OpenRound) -> list[Session]:
        return self._not_drawn(self._selector.candidates(round_, self.rounds, self._now))

    def _not_drawn(self, waiting: Sequence[Session]) -> list[Session]:
        return [session for session in waiting if session.id not in self._drawn]
