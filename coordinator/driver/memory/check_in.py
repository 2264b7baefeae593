"""Answers to check-ins and to waiting devices, and the memory of a driver, all that its thread keeps between turns."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from coordinator.commands import AwaitAssignment, CancelWait, CheckInDevice
from coordinator.driver.memory.open_rounds import LoadedTask, OpenRound, OpenRounds
from coordinator.driver.memory.pace_steering import Returns, Steering, Told, Visit, bounded
from coordinator.driver.memory.round_sums import RoundSum, SecureRounds, SharedSums
from coordinator.driver.memory.selector import ParticipationLimit
from coordinator.driver.memory.sessions import Presence, Session, Sessions
from coordinator.errors import DeviceRevoked, Unavailable, UnknownPopulation
from coordinator.rules.aggregation import collector
from coordinator.rules.pacing import IDLE_PER_S, Notice, Return, Tally, away
from coordinator.rules.selection import unfit
from coordinator.store.records.rows import ModelTally, SessionCounts
from fedcore.wire.messages import Accepted, CheckInAnswer, Rejected, RejectionReason, RetryWindow

# Recent check-ins: when the last one was accepted, and why devices were rejected.
#
# Only in memory, and only counts: nothing of a single device. Safe from any thread.

_SPAN_S = 60.0
"""Rejections are counted over one to two of these: a device that was sent away comes back after a minute."""
ByTask: TypeAlias = "defaultdict[str, Counter[str]]"


class CheckInLog:
    """The arrivals at one coordinator. Times are on the driver's clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._spans: dict[int, ByTask] = {}

    def accepted(self, population: str, now: float) -> None:
        """Note an accepted check-in."""
        self._last[population] = now

    def rejected(self, obstacles: Mapping[str, str], now: float) -> None:
        """Count a rejected check-in: the obstacle between the device and each task."""
        with self._lock:
            counts = self._counts_at(now)
            for task, obstacle in obstacles.items():
                counts[task][obstacle] += 1

    def heard(self, obstacles: Mapping[str, Mapping[str, int]], now: float) -> None:
        """Count rejected check-ins, by task and by the obstacle between their devices and it."""
        with self._lock:
            counts = self._counts_at(now)
            for task, by_obstacle in obstacles.items():
                counts[task].update(by_obstacle)

    def accepted_at(self, population: str) -> float | None:
        """When the last check-in to a population was accepted; None when none was."""
        return self._last.get(population)

    def lately(self, task: str, now: float) -> Counter[str]:
        """The rejected check-ins of the last minute or two, by the obstacle between the device and a task."""
        with self._lock:
            self._forget_before(int(now // _SPAN_S) - 1)
            return sum((counts[task] for counts in self._spans.values() if task in counts), Counter[str]())

    def _counts_at(self, now: float) -> ByTask:
        span = int(now // _SPAN_S)
        if span not in self._spans:
            self._forget_before(span - 1)
            self._spans[span] = defaultdict(Counter)
        return self._spans[span]

    def _forget_before(self, first: int) -> None:
        self._spans = {span: counts for span, counts in self._spans.items() if span >= first}


# Populations that another replica drives: their devices are sent away here, by the last notice of their driver.
#
# Whoever a task may use is passed on to the driver. So this knows of no session, no round and no device that rests.

_MOST = 1 << 16
"""Visits that are kept until the driver is told of them, which is every second."""


class Followed:
    """A population that another replica drives. From any thread.

    bounds: of retry windows. key: what authenticates return tokens. `ahead_s`: how far the driver's clock is ahead of
    this one.
    """

    def __init__(self, notice: Notice, bounds: RetryWindow, key: Callable[[], bytes]) -> None:
        self.ahead_s = 0.0
        self._notice = notice
        self._bounds = bounds
        self._returns = Returns(key)
        self._idle_until = notice.idle_until
        self._visits: list[tuple[bytes, Return]] = []
        self._obstacles: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def renew(self, notice: Notice) -> None:
        """Take over the driver's next notice."""
        with self._lock:
            if notice.generation != self._notice.generation:  # these devices may come again
                self._visits, self._obstacles = [], Counter()
            self._notice = notice
            # The driver does not know yet whom this replica has sent away since it told last.
            self._idle_until = max(self._idle_until, notice.idle_until)

    def turn_away(self, command: CheckInDevice, now: float) -> Rejected | None:
        """Reject a device that comes too early, or that no task can use; None for any other."""
        now += self.ahead_s
        with self._lock:
            tasks = self._notice.tasks
            self._returns.follow(command.population, self._notice.generation)
            early = self._returns.left(command, now)
            if early is not None:
                return Rejected("too-early", *bounded(early, self._bounds))
            obstacles = {task: command.eligibility.obstacle(task, needs) for task, needs in tasks.items()}
            if not all(obstacles.values()):
                return None
            reason, formats = unfit(tasks, obstacles)
            self._idle_until = max(self._idle_until, now) + 1 / IDLE_PER_S
            told = self._returns.expect(command, away(self._idle_until - now, self._bounds), now)
            self._count(command, told, obstacles, now)
        return Rejected(reason, *told, formats)

    def take(self) -> Tally | None:
        """What the driver has not been told yet; None if that is nothing."""
        with self._lock:
            if not self._visits:
                return None
            visits, self._visits = self._visits, []
            obstacles, self._obstacles = self._obstacles, Counter()
            return Tally.of(self._notice.generation, visits, obstacles)

    def _count(self, command: CheckInDevice, told: Told, obstacles: Mapping[str, str], now: float) -> None:
        if len(self._visits) < _MOST:
            mark = self._returns.generation(command.population).mark(command.device)
            self._visits.append((mark, Return(now + told.retry.min_s, now + told.retry.max_s)))
            self._obstacles.update(obstacles.items())


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The facts by which check-ins are answered: replaced as a whole, so that any thread may read them.

    driven: the populations that this process drives. active: their active tasks, by population. awaited: the devices
    that should come back soon (`OpenRounds.awaited`), by population.
    """

    populations: frozenset[str] = frozenset()
    driven: AbstractSet[str] = frozenset()
    active: Mapping[str, tuple[LoadedTask, ...]] = field(default_factory=dict)
    awaited: Mapping[str, AbstractSet[str]] = field(default_factory=dict)


class CheckIns:
    """Answers devices from `sessions` and the facts of `learn`. Only `turn_away` may be called from any thread."""

    def __init__(
        self, sessions: Sessions, participation: ParticipationLimit, steering: Steering, session_counts: SessionCounts
    ) -> None:
        self._sessions = sessions
        self._participation = participation
        self._steering = steering
        self._session_counts = session_counts
        self.arrivals = CheckInLog()
        self._known = _Snapshot()
        self.followed: Mapping[str, Followed] = {}
        """The populations that other replicas drive, of which this one knows enough: replaced as a whole."""
        self._open: dict[str, LoadedTask] = {}
        """The tasks for which a device may wait."""
        self.closed = self.blind = False
        """`closed`: the service is about to stop. `blind`: the database could not be read at the last look."""

    @property
    def populations(self) -> frozenset[str]:
        """All populations, also those that other processes drive."""
        return self._known.populations

    def learn(
        self,
        populations: frozenset[str],
        driven: AbstractSet[str],
        tasks: Iterable[LoadedTask],
        rounds: OpenRounds,
        now: float,
    ) -> None:
        """Take over these populations and tasks; devices that wait for a task which is over are sent away.

        driven: the populations that this process drives, of which the tasks are.
        """
        tasks = tuple(tasks)
        active = {name: tuple(task for task in tasks if task.active and task.population == name) for name in driven}
        earlier = {task.id for there in self._known.active.values() for task in there}
        awaited = {name: frozenset().union(*map(rounds.awaited, there)) for name, there in active.items()}
        self._known = _Snapshot(populations, frozenset(driven), active, awaited)
        self._steering.learn(tasks, rounds, now)
        # A device that nobody needed may be the one for a new task.
        self._steering.forget_returns({task.population for task in tasks if task.active and task.id not in earlier})
        before, self._open = self._open, {task.id: task for task in tasks if task.active or rounds.selects(task)}
        if before.keys() - self._open.keys():
            left = [session for session in self._sessions.waiting() if not _has_offer(session, self._open.values())]
            self.send_away(left, "no-task", now)

    def turn_away(self, command: CheckInDevice, now: float) -> Rejected | None:
        """Reject at once a device that no task can use; None if `check_in` must decide, here or elsewhere.

        From any thread, without waiting for the driver's. Most check-ins of a large population end here, and cost no
        more than this.
        """
        snapshot = self._known
        if self.closed:
            return None
        if command.population not in snapshot.driven:
            followed = self.followed.get(command.population)
            rejected = None if followed is None else followed.turn_away(command, now)
            return rejected and self._counted(command, rejected)
        offers = self._offers(snapshot, command, now)
        return self._counted(command, offers) if isinstance(offers, Rejected) else None

    def check_in(self, command: CheckInDevice, now: float) -> CheckInAnswer:
        """Start a session, or say why not.

        Raises UnknownPopulation, or Unavailable for a population that another process drives.
        """
        if command.population not in self._known.populations:
            if self.blind:
                raise Unavailable("the database cannot be read now, which may know this population; ask again")
            raise UnknownPopulation(f"no population is called {command.population!r}")
        if command.population not in self._known.driven:
            raise Unavailable("this coordinator does not drive the population yet, or no longer; ask again")
        offers = self._shutting_down(command, now) if self.closed else self._offers(self._known, command, now)
        if isinstance(offers, Rejected):
            return self._counted(command, offers)
        self.arrivals.accepted(command.population, now)
        active = self._known.active.get(command.population, ())
        eligibility = command.eligibility.only(task.needs for task in active)
        session, older = self._sessions.enter(command, eligibility, now)
        if any(task.settings.same_cohort for task in offers):
            retry = self._steering.soon
        else:
            rest_s = min(task.settings.min_separation_s for task in offers)
            retry = self._steering.after(command.population, rest_s, now)
        if older is not None:
            # The same device: it is told to come back once.
            self._sessions.reject(older, Rejected("superseded", retry))
        return Accepted(session, tuple(task.offer for task in offers), retry)

    def _shutting_down(self, command: CheckInDevice, now: float) -> Rejected:
        left = self._steering.early(command, now)
        return self._rejected(command, "shutting-down", now) if left is None else Rejected("too-early", *left)

    def _counted(self, command: CheckInDevice, rejected: Rejected) -> Rejected:
        self._session_counts.count(command.population, "", [f"rejected: {rejected.reason}"])
        return rejected

    def _offers(self, snapshot: _Snapshot, command: CheckInDevice, now: float) -> list[LoadedTask] | Rejected:
        """The tasks that a device may wait for, at least one; or why there is none, or that it comes too early.

        An accepted device comes here twice, since tasks may have changed while its command was queued. It is judged
        once: `Eligibility` keeps the result.
        """
        name, device = command.population, command.device
        active = snapshot.active.get(name, ())
        obstacles = {task.id: command.eligibility.obstacle(task.id, task.needs) for task in active}
        fitting = [task for task in active if not obstacles[task.id]]
        if not fitting:
            early, told = self._steering.turned_away(command, now)
            if early:
                return Rejected("too-early", *told)
            self.arrivals.rejected(obstacles, now)
            reason, formats = unfit({task.id: task.needs for task in active}, obstacles)
            return Rejected(reason, *told, formats)
        left = self._steering.early(command, now)
        if left is not None:
            return Rejected("too-early", *left)
        offered = [task for task in fitting if not self._participation.is_resting(task.id, device, now)]
        if offered:
            return offered
        self.arrivals.rejected({task: obstacle or "resting" for task, obstacle in obstacles.items()}, now)
        rests = [self._participation.remaining(task.id, device, now) for task in fitting]
        return Rejected("resting", *self._steering.rested(command, *min(rests), now))

    def wait(self, command: AwaitAssignment, answer: Future[Any], now: float) -> None:
        """Park `answer` until there is one. Raises UnknownSession or ForeignSession."""
        tasks = None if command.tasks is None else command.tasks.intersection(self._open)
        session = self._sessions.wait(replace(command, tasks=tasks), answer, now)
        if session is not None and not _has_offer(session, self._open.values()):
            # The task was over between check-in and this request, when `learn` found nobody to send away.
            self.send_away([session], "no-task", now)

    def cancel_wait(self, command: CancelWait, now: float) -> None:
        """End a wait whose connection is gone."""
        self._sessions.cancel_wait(command, now)

    def send_away(self, sessions: Iterable[Session], reason: RejectionReason, now: float) -> None:
        """End sessions, and tell their devices why and when to come back."""
        for session in sessions:
            if session.answer is None:
                # Its device gets no answer, so it is not expected back.
                self._sessions.leave(session)
            else:
                self._sessions.reject(session, self._rejected(session, reason, now))

    def forget(self, populations: frozenset[str], now: float) -> None:
        """Drop populations that another process drives now: their devices come back, and reach it."""
        self._known = replace(self._known, driven=self._known.driven - populations)
        self.send_away(self._sessions.of(populations), "shutting-down", now)
        self._steering.forget_returns(populations)

    def dismiss(self, now: float) -> None:
        """Send away the devices whose time is up; once closed, all that wait."""
        self.send_away(self._sessions.overdue(now), "not-selected", now)
        if self.closed:
            self.send_away(list(self._sessions.waiting()), "shutting-down", now)

    def _rejected(self, visit: Visit, reason: RejectionReason, now: float) -> Rejected:
        useful = reason in ("not-selected", "shutting-down")
        if useful and visit.device in self._known.awaited.get(visit.population, ()):
            return Rejected(reason, *self._steering.awaited(visit, now))
        when = self._steering.needed if useful else self._steering.idle
        return Rejected(reason, *when(visit, now))


def _has_offer(session: Session, tasks: Iterable[LoadedTask]) -> bool:
    mine = (task for task in tasks if task.population == session.population)
    return any(not session.eligibility.obstacle(task.id, task.needs) for task in mine)


class Memory:
    """Loaded tasks, their open rounds and sums, and the devices that take part. Only the driver's thread changes it.

    replica: the id of this process. key: what authenticates return tokens. clock: seconds, with any origin.
    """

    def __init__(self, replica: str, retry: RetryWindow, key: Callable[[], bytes], clock: Callable[[], float]) -> None:
        self.session_counts, self.model_counts = SessionCounts(), ModelTally()
        self.sessions = Sessions(replica, self.session_counts)
        self.participation = ParticipationLimit()
        self.steering = Steering(retry, key)
        self.check_ins = CheckIns(self.sessions, self.participation, self.steering, self.session_counts)
        self.presence = Presence(clock)
        self.secure = SecureRounds()
        self.sums: dict[int, RoundSum] = {}
        self.shared = SharedSums()
        self.heard_of: dict[str, float] = {}
        """When this process last heard of each replica that sums reports for it, on its clock."""
        self.tasks: dict[str, LoadedTask] = {}
        self.rounds = OpenRounds()
        self._last_round: dict[str, int] = {}

    def replace_rounds(self, rounds: OpenRounds, now: float) -> None:
        """Take over the open rounds as they are now; rounds that are missing have ended."""
        open_ids = {round_.id for round_ in rounds}
        for task_id, ended in self.rounds.running.items():
            if ended.id not in open_ids:
                self.sums.pop(ended.id, None)
                successor = rounds.running.get(task_id)
                if successor is not None and successor.predecessor == ended.id:
                    self.presence.hand_over(ended.id, successor.id)
                    self.steering.ended(ended.task, now)
                    continue
                self.sessions.end_assignments(task_id, "not needed")
                self.participation.end(task_id, now, committed=False)
                if ended.value.assigned:
                    self.steering.ended(ended.task, now)
        self.rounds = rounds
        self.participation.leave_out(rounds.left_out)
        self.secure.adopt(rounds.running.values(), now)
        self.presence.forget_all_but({round_.id for round_ in rounds if not round_.value.closed})
        self._last_round |= {task_id: round_.id for task_id, round_ in rounds.running.items()}

    def sum_of(self, round_: OpenRound) -> RoundSum:
        """What was added up of a round that runs."""
        if round_.id not in self.sums:
            self.sums[round_.id] = RoundSum(collector(round_.plan.report, round_.task.settings.clear))
        return self.sums[round_.id]

    def drop_populations(self, populations: frozenset[str], now: float) -> None:
        """Drop populations that this process no longer drives: their sessions, rounds, sums and participations."""
        lost = {round_.id for round_ in self.rounds if round_.task.population in populations}
        self.secure.dismiss(Unavailable("another replica took over, and abandons the round"), lost)
        self.replace_rounds(self.rounds.only({round_.id for round_ in self.rounds} - lost), now)
        self.tasks = {id_: task for id_, task in self.tasks.items() if task.population not in populations}
        self.participation.drop_populations(populations)
        self.check_ins.forget(populations, now)

    def revoke(self, device: str) -> None:
        """End the waits of a device that was revoked; its assignments are lost with the next transaction."""
        for session in self.sessions.of_device(device):
            if session.assignment is None:
                self.sessions.refuse(session, DeviceRevoked())
            else:
                self.presence.give_up(session.assignment.assignment)

    def least_recently_served(self, task_ids: Iterable[str]) -> list[str]:
        """The tasks, least recently served first."""
        return sorted(task_ids, key=lambda task_id: (self._last_round.get(task_id, 0), task_id))
