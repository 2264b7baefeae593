"""The fleet of `tests.coordinator.one_hot`, what may befall it, and what must hold whatever does."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import sqlalchemy

from coordinator.commands import AbortAssignment, AwaitAssignment, CancelWait, CheckInDevice, CountReport, QueuedCommand
from coordinator.errors import ConflictingReport, Refusal, TaskEnded, Unavailable
from coordinator.rules.selection import Eligibility
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_settings import Buffered
from coordinator.store.tables import ROUNDS
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.params import VectorSpec
from fedcore.report import Segment
from fedcore.wire.messages import Abort, Assignment, CheckIn, Receipt
from tests.coordinator.bundles import make_bundle, make_plan, report_vector
from tests.coordinator.conftest import Desk
from tests.coordinator.devices import CAPABILITIES
from tests.coordinator.disk import Disk

DEVICES, MARKS = 7, 16
SETTINGS = TaskSettings(
    population="phones",
    goal=3,
    minimum=2,
    rounds=8,
    over_selection=1.6,
    selection_timeout_s=20.0,
    reporting_deadline_s=60.0,
)
LONGEST_S = 2 * (SETTINGS.selection_timeout_s + SETTINGS.reporting_deadline_s) + 60.0
"""Within this time every round ends: the one it is held behind, a pause after four failures, and its own deadlines."""
LEAPS_S = (0.1, 1.0, 1.0, 5.0, 5.0, 20.0, 61.0)
"""How far the clock goes at once; a deadline that lies within is seen that much late."""
LEASE_S = 15.0
Operation = tuple[str, int]


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class Phone:
    """What one device knows. `given` are its assignments, the newest last."""

    index: int
    session: str = ""
    waiting: Future | None = None
    given: list[Assignment] = field(default_factory=list)


@dataclass(slots=True)
class Sent:
    """A request on its way: `heard` is whether the device will hear the answer."""

    queued: QueuedCommand
    phone: Phone
    heard: bool = True


class World:
    """Phones, a coordinator, and the sea between them."""

    algorithm, settings, longest_s = "fedavg", SETTINGS, LONGEST_S
    operations: ClassVar[Mapping[str, float]] = {}
    """What may befall this world beside what may befall any, by weight."""

    def __init__(self, folder: Path, database: str = ""):
        self.source = random.Random(0)
        self.folder, self.url = folder, database or f"sqlite:///{folder}/state.db"
        size = DEVICES + MARKS
        segments = (Segment("delta", size, "mean"), Segment("weight", 1, "sum"))
        segments += (Segment("train.metrics", 2, "sum", ("examples", "loss")),)
        self.plan = make_plan(size, (VectorSpec("params", size),), segments, weighting="uniform")
        self.start = np.zeros(size, np.float32)
        settings = {"weighting": "uniform"}
        self.bundle = make_bundle(folder / "bundle", self.plan, self.algorithm, settings, self.start)
        self.phones = [Phone(index) for index in range(DEVICES)]
        self.seen, self.inbox = Counter(), []
        self.marks, self.bodies, self.receipts = {}, {}, {}
        self.aborted, self.over = set(), set()
        self.now = 0.0
        self.operator = open_coordinator_store(self.url, folder / "blobs", clock=lambda: self.now)
        self.homes, self.store, self.ghost = 0, None, None
        self.boot()
        self.new_task()

    def close(self):
        self.lay_to_rest()
        self.store.close()
        self.operator.close()

    def boot(self):
        """A coordinator process starts where the last one was; of that, the database alone is left."""
        if self.store:
            self.store.close()
        self.store = open_coordinator_store(self.url, self.folder / "blobs", clock=lambda: self.now)
        self.desk = Desk(self.store, self.source, url=f"http://home-{self.homes}", lease_s=LEASE_S, now=self.now)
        self.disk = Disk(self.store.database, lambda: self.now)
        self.inbox.clear()
        for phone in self.phones:
            phone.session, phone.waiting = "", None

    def lay_to_rest(self):
        if self.ghost:
            self.ghost.store.close()
        self.ghost = None

    def new_task(self):
        self.task = self.operator.register_task(self.bundle, self.settings).id
        self.number, self.model = 0, self.start

    # --- operations

    def do(self, operation: Operation):
        name, pick = operation
        self.seen[name] += 1
        getattr(self, name)(pick)

    def turn(self, _=0):
        """Whatever is on its way arrives, all in one turn; then all promises are looked at."""
        sent, self.inbox = self.inbox, []
        self.desk.driver.turn([one.queued for one in sent])
        self.hear(sent)
        for phone in self.phones:
            self.hear_assignment(phone)
        self.look()

    def check_in(self, pick):
        self.arrive(self.phones[pick % DEVICES])

    def wait(self, pick):
        for phone in self.among(pick, self.may_wait):
            self.park(phone, 1.0 + pick % 30)

    def hang_up(self, pick):
        for phone in self.among(pick, lambda phone: phone.waiting):
            self.send(phone, CancelWait(phone.session, phone.waiting))
            phone.waiting = None

    def upload(self, pick, heard=True):
        for phone in self.among(pick, self.may_upload):
            self.report(phone, phone.given[-1], heard=heard)

    def lose_answer(self, pick):
        self.upload(pick, heard=False)

    def lose_request(self, pick):
        if self.inbox:
            lost = self.inbox.pop(pick % len(self.inbox))
            if isinstance(lost.queued.command, AwaitAssignment):
                lost.phone.waiting = None

    def replay(self, pick):
        for phone in self.among(pick, lambda phone: phone.given):
            self.report(phone, phone.given[-1 - pick % min(3, len(phone.given))])

    def another_body(self, pick):
        for phone in self.among(pick, lambda phone: phone.given):
            self.report(phone, phone.given[-1 - pick % min(2, len(phone.given))], loss=1 + pick)

    def abort(self, pick):
        for phone in self.among(pick, self.may_upload):
            self.send(phone, AbortAssignment(phone.given[-1].assignment, Abort("runtime-failed")))

    def abort_again(self, pick):
        for phone in self.among(pick, lambda phone: phone.given):
            self.send(
                phone,
                AbortAssignment(phone.given[-1 - pick % min(3, len(phone.given))].assignment, Abort("conditions")),
            )

    def advance(self, pick):
        self.pass_time(LEAPS_S[pick % len(LEAPS_S)])
        self.turn()

    def linger(self, pick):
        """Time passes as it does, and the driver looks: whoever does not hold an assignment is lost by and by."""
        for _ in range(10 + pick % 6):
            self.pass_time(0.5)
            self.turn()

    def hold(self, pick):
        for phone in self.among(pick, lambda phone: phone.given):
            self.desk.driver.presence.begin(phone.given[-1].assignment)

    def break_off(self, pick):
        """A connection breaks, or was closed by a kill."""
        for phone in self.among(pick, lambda phone: phone.given):
            self.desk.driver.presence.end(phone.given[-1].assignment, broken=True)

    def pause(self, _):
        self.operate(self.operator.pause)

    def resume(self, _):
        self.operate(self.operator.resume)

    def cancel(self, _):
        self.operate(self.operator.cancel)

    def restart(self, _):
        self.boot()

    def take_over(self, _):
        """The process stands still for so long that another one takes its populations."""
        self.lay_to_rest()
        self.ghost, self.store = self.desk, None
        self.homes += 1
        self.boot()
        for _ in range(2):
            self.turn()
            self.pass_time(LEASE_S + 1)
        self.turn()

    def haunt(self, pick):
        """The process that stood still goes on, not knowing that it was taken for gone: somebody reports to it."""
        for phone in self.among(pick, lambda phone: phone.given and self.ghost):
            queued, self.inbox = self.inbox, []
            self.report(phone, phone.given[-1 - pick % min(3, len(phone.given))])
            sent, self.inbox = self.inbox, queued
            self.ghost.now = self.now
            self.ghost.driver.turn([one.queued for one in sent])
            self.hear(sent)
            self.look()

    def fail_commit(self, _):
        self.disk.faults = ["fails"]

    def lose_commit(self, _):
        self.disk.faults = ["is lost"]

    # --- how it is done

    def may_wait(self, phone):
        return bool(phone.session) and phone.waiting is None

    def may_upload(self, phone):
        return bool(phone.given) and phone.given[-1].assignment not in self.receipts

    def arrive(self, phone):
        device, message = f"device-{phone.index}", CheckIn(capabilities=CAPABILITIES, examples={"default": 9})
        self.send(phone, CheckInDevice("phones", device, Eligibility.of(device, message)))

    def park(self, phone, seconds):
        phone.waiting = self.send(phone, AwaitAssignment(phone.session, f"device-{phone.index}", seconds))

    def among(self, pick, fits):
        """One of the phones that something can happen to, if any."""
        able = [phone for phone in self.phones if fits(phone)]
        return [able[pick % len(able)]] if able else []

    def send(self, phone, request, heard=True):
        future = Future()
        self.inbox.append(Sent(QueuedCommand(request, future), phone, heard))
        return future

    def pass_time(self, seconds):
        self.now += seconds
        self.desk.now = self.now

    def operate(self, move):
        try:
            move(self.task)
        except TaskEnded:
            if self.operator.task(self.task).state in (TaskState.COMPLETED, TaskState.CANCELLED):
                self.new_task()

    def report(self, phone, given, loss=0, heard=True):
        vector = report_vector(self.delta(phone, given), 1.0, loss, self.plan)
        sha256 = hashlib.sha256(vector.tobytes()).hexdigest()
        self.bodies.setdefault(given.assignment, set()).add(loss)
        self.send(phone, CountReport(given.assignment, sha256, vector), heard)

    def delta(self, phone, given):
        """One for the device and one for the attempt: neighbouring attempts have other marks."""
        attempt = (given.task, given.round, given.attempt)
        delta = np.zeros(DEVICES + MARKS, np.float32)
        delta[phone.index] = delta[DEVICES + self.marks.setdefault(attempt, len(self.marks)) % MARKS] = 1
        return delta

    # --- what devices hear

    def hear(self, sent):
        for one in sent:
            if isinstance(one.queued.command, AwaitAssignment) or not one.heard:
                continue
            outcome = outcome_of(one.queued.future)
            if isinstance(outcome, Unavailable):
                continue
            match one.queued.command:
                case CheckInDevice():
                    one.phone.session, one.phone.waiting = getattr(outcome, "session", ""), None
                case CountReport() as request:
                    self.hear_of_report(request, outcome)
                case AbortAssignment(assignment):
                    self.hear_of_abort(assignment, outcome)

    def hear_of_report(self, request, outcome):
        held = self.receipts.get(request.assignment)
        if isinstance(outcome, Receipt):
            demand(outcome.sha256 == request.sha256, f"the receipt is for another body: {outcome}")
            demand(held in (None, outcome), f"a second receipt differs: {held}, {outcome}")
            demand(request.assignment not in self.aborted, f"a receipt after giving up: {outcome}")
            self.receipts[request.assignment] = outcome
            return
        self.over.add(request.assignment)
        if held is not None:
            same = held.sha256 == request.sha256
            demand(not same, f"a report that has a receipt is refused: {outcome!r}")
            demand(isinstance(outcome, ConflictingReport), f"another body is refused as {outcome!r}")

    def hear_of_abort(self, assignment, outcome):
        if assignment in self.receipts:
            demand(isinstance(outcome, ConflictingReport), f"a counted report was given up: {outcome!r}")
        elif outcome is None:
            self.aborted.add(assignment)
            self.over.add(assignment)

    def hear_assignment(self, phone):
        if phone.waiting is None or not phone.waiting.done():
            return
        outcome, phone.waiting = outcome_of(phone.waiting), None
        if isinstance(outcome, Assignment):
            if outcome.assignment not in {given.assignment for given in phone.given}:
                phone.given = [*phone.given[-20:], outcome]
        else:
            phone.session = ""

    # --- what must hold

    def look(self):
        query = sqlalchemy.select(ROUNDS).where((ROUNDS.c.task == self.task) & (ROUNDS.c.number > self.number))
        with self.operator.database.engine.connect() as connection:
            rows = connection.execute(query.order_by(ROUNDS.c.id)).all()
        for row in rows:
            if row.state == RoundState.COMMITTED:
                demand(row.number == self.number + 1, f"round {row.number} follows round {self.number}")
                self.check_round(row)
            elif row.state != RoundState.ABANDONED:
                began = max(row.opened_at, self.disk.last_at)
                demand(
                    self.now <= began + self.longest_s + max(LEAPS_S) + 2,
                    f"round {row.number} is {row.state} since {row.opened_at}",
                )

    def check_round(self, row):
        """Every device of the attempt asks for its receipt; then the mean must be theirs, to the last bit."""
        attempt = (self.task, row.number, row.attempt)
        self.disk.faults, queued, self.inbox = [], self.inbox, []
        self.number = row.number
        cohort = [
            (phone, given)
            for phone in self.phones
            for given in phone.given
            if (given.task, given.round, given.attempt) == attempt
        ]
        for phone, given in cohort:
            if given.assignment not in self.receipts:
                for loss in self.bodies.get(given.assignment, ()):
                    self.report(phone, given, loss)
        self.turn()
        self.inbox = queued
        demand(len(cohort) == len({phone.index for phone, _ in cohort}), f"a device is in round {attempt} twice")
        holders = [(phone, given) for phone, given in cohort if given.assignment in self.receipts]
        total = sum((self.delta(phone, given) for phone, given in holders), np.zeros(DEVICES + MARKS))
        after = self.operator.checkpoint(self.task, row.number)["params"]
        wanted = (self.model + total / max(1, len(holders))).astype(np.float32)
        if not np.array_equal(after, wanted):
            counted = (after.astype(np.float64) - self.model) * row.reported
            raise Violation(f"round {attempt} counted {counted.round(3)}, receipts say {total}")
        demand(
            row.reported == len(holders), f"round {attempt} says {row.reported} reports, {len(holders)} have receipts"
        )
        demand(row.reported >= self.settings.policy.minimum, f"round {attempt} committed {row.reported} reports")
        self.model = after
        self.seen["rounds committed"] += 1
        self.seen["devices lost in them"] += row.lost
        self.seen["rounds committed with replacements"] += row.assigned > SETTINGS.policy.cohort
        self.end_round(row)

    def end_round(self, row):
        if row.number == self.settings.rounds:
            demand(self.operator.task(self.task).state is TaskState.COMPLETED, "the last round completes the task")

    def fair_weather(self):
        """Nothing goes wrong for once: a round must be won before its deadlines."""
        self.disk.faults = []
        won, until = self.seen["rounds committed"], self.now + LONGEST_S + 2
        while self.seen["rounds committed"] == won:
            demand(self.now <= until, f"no round was won in {LONGEST_S} seconds of fair weather")
            self.resume(0)
            for phone in self.phones:
                if phone.waiting is None and (not self.may_upload(phone) or phone.given[-1].assignment in self.over):
                    self.arrive(phone)
            self.turn()
            for phone in filter(self.may_wait, self.phones):
                self.park(phone, LONGEST_S)
            self.turn()
            for phone in filter(self.may_upload, self.phones):
                self.report(phone, phone.given[-1])
            self.turn()
            self.pass_time(1)


class BufferedWorld(World):
    """The same at a task in mode buffered: rows say which reports are in a sum, and from which model each starts."""

    algorithm, longest_s = "fedbuff", float("inf")
    settings = TaskSettings(
        population="phones",
        goal=3,
        rounds=8,
        reporting_deadline_s=60.0,
        buffered=Buffered(concurrency=5, max_staleness=2),
    )

    def turn(self, _=0):
        self.deliver()
        self.look()

    def deliver(self):
        """A report beyond the goal is answered in the turn after the commit, which a fault delays by a second."""
        sent, self.inbox = self.inbox, []
        self.desk.driver.turn([one.queued for one in sent])
        self.desk.driver.turn([])
        while any(not one.queued.future.done() for one in sent if isinstance(one.queued.command, CountReport)):
            self.pass_time(1.0)
            self.go_on()
        self.hear(sent)
        for phone in self.phones:
            self.hear_assignment(phone)

    def go_on(self):
        self.desk.driver.turn([])

    def check_round(self, row):
        """The model must move by the reports that have a row, whose devices get their receipts, and by no other."""
        before, self.number = self.model, row.number
        self.model = self.operator.checkpoint(self.task, row.number)["params"]
        known = {given.assignment: (phone, given) for phone in self.phones for given in phone.given}
        in_sum = self.operator.counted(self.task, row.number)
        demand(len({one.device for one in in_sum}) == len(in_sum) == row.reported, f"not {row.reported}: {in_sum}")
        demand(self.goal_is_met(row.reported), f"not the goal: {in_sum}")
        ages = [row.number - one.number for one in in_sum]
        demand(max(ages) <= self.settings.max_staleness, f"reports of round {row.number} have ages {ages}")
        demand(row.staleness == [ages.count(age) for age in range(max(ages) + 1)], f"{row.staleness} for {ages}")
        moved = sum((1 + age) ** -0.5 * self.delta(*known[one.id]) for one, age in zip(in_sum, ages, strict=True))
        found = (self.model - before) * row.reported
        demand(np.allclose(found, moved, rtol=0, atol=1e-5), f"round {row.number} counted {found}, not {moved}")
        self.ask_for_receipts(known, in_sum)
        self.seen["rounds committed"] += 1
        self.seen["old reports in them"] += sum(age > 0 for age in ages)
        self.end_round(row)

    def goal_is_met(self, reported):
        return reported == self.settings.goal

    def ask_for_receipts(self, known, in_sum):
        self.disk.faults, queued, self.inbox = [], self.inbox, []
        for one in in_sum:
            if one.id not in self.receipts:
                for loss in self.bodies.get(one.id, ()):
                    self.report(*known[one.id], loss)
        self.deliver()
        self.inbox = queued
        demand({one.id for one in in_sum} <= self.receipts.keys(), "a report without a receipt is in a sum")

    def delta(self, phone, given):
        """One for the device, and one for the model that it starts from."""
        delta = np.zeros(DEVICES + MARKS, np.float32)
        delta[phone.index] = delta[DEVICES + given.round] = 1
        return delta


def outcome_of(future):
    """What became of a request: an answer, or the refusal."""
    demand(future.done(), "a request was not answered")
    try:
        return future.result(timeout=0)
    except Refusal as refusal:
        return refusal


def demand(kept, broken):
    if not kept:
        raise Violation(broken)
