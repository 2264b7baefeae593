"""A task's rounds in virtual time: the rules of rounds, buffers, selection and participation, step by step."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from coordinator.rules import buffers, rounds as round_rules
from coordinator.rules.pacing import GATHER_S, Demand, RoundTimes
from coordinator.rules.selection import UNRELIABLE_ROUNDS, Participations, draw, drawable
from coordinator.rules.states import AssignmentState, RoundState, broken_after_s, lost_after_s
from secagg.session import SessionPhase
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import CommittedRound, Course, Devices, Drawing, Exchanges, Times


class _Work(NamedTuple):
    """An open assignment: which one, since when, of which round, and the CPU seconds that it takes in all."""

    serial: int
    since: float
    number: int
    cpu_s: float


class TaskRounds:
    """The rounds of a task: the one that runs, and the one that is held behind it."""

    def __init__(self, config: ForecastConfig, devices: Devices, course: Course, drawing: Drawing, number: int) -> None:
        """number: of the task among those of its population, which draw from the same devices."""
        settings = self.settings = config.task
        self.policy, self.buffered = settings.policy, settings.buffered is not None
        self.drawing, self.times = drawing, RoundTimes()
        self.devices, self.course, self._config = devices, course, config
        self._chance = np.random.default_rng((config.seed, 2, number) if number else (config.seed, 2))
        self._source = random.Random(config.seed + number)
        self._running: round_rules.Round | None = None
        self._held: round_rules.Round | None = None
        self._opened = self._drawn_at = self._not_before = 0.0
        self._number, self._failures, self._serial = 1, 0, 0
        self._open: dict[int, _Work] = {}
        self._events: list[tuple[float, int, int, AssignmentState]] = []
        self._unreliable: dict[int, int] = {}
        self._taken: set[int] = set()
        self._failing: set[int] = set()
        self._reported: list[tuple[int, int]] = []
        self._exchanges: Exchanges | None = None
        separation = settings.separation
        self._resting = None if separation is None else Participations(separation, 0)

    def advance(self, now: float) -> None:
        """Do all that is due by now."""
        while self._events and self._events[0][0] <= now:
            at, serial, row, how = heapq.heappop(self._events)
            work = self._open.get(row)
            if work is not None and work.serial == serial:
                self._end_work(row, how, at)
        self._exchange(now)
        if self.idle or self.course.paused:
            return
        self._open_round(now)
        if self._held is not None and self._running is None and now >= self._not_before:
            self._running, self._held, self._opened = self._held, None, now
            self._step(round_rules.Waiting(len(self._candidates(self._running, now))), now)
        elif self._running is not None:
            self._step_due(self._running, now)

    @property
    def idle(self) -> bool:
        """Whether nothing can be due but ends of work: no round runs, and nobody waits."""
        return self._running is None and self._held is None and not self.drawing.waiting

    def is_resting(self, row: int, now: float) -> bool:
        """Whether a device that comes now rests from its last participation."""
        return self._resting is not None and self._resting.is_resting(str(row), now)

    def remaining(self, row: int, now: float) -> tuple[float, int]:
        """For how long, in seconds and in rounds, a device that rests must stay away."""
        return (0.0, 0) if self._resting is None else self._resting.remaining(str(row), now)

    def demand(self, now: float) -> Demand:
        """The demand of the rounds for devices."""
        running = self._running
        cohort = self.policy.cohort
        if self.buffered and running is not None:
            cohort = max(buffers.places(running), self.policy.goal)
        every_s = self.times.takes_s(self.policy) + GATHER_S
        return Demand(cohort, self._opens_in_s(running, now), every_s, GATHER_S)

    def _opens_in_s(self, running: round_rules.Round | None, now: float) -> float:
        if running is None:
            return max(0.0, self._not_before - now)
        if running.state in (RoundState.SELECTING, RoundState.CONFIGURING) or self._draws_more(running, now):
            return 0.0
        return self.times.left_s(self.policy, now)

    def _draws_more(self, running: round_rules.Round, now: float) -> bool:
        if self.buffered:
            return buffers.places(running) > 0
        return running.missing(now) > 0 and (self._exchanges is None or self._exchanges.advertising)

    # --- rounds

    def _open_round(self, now: float) -> None:
        """Open the next round, if somebody waits for it: held while another one runs, or during a pause."""
        if self._held is not None or not self._fitting():
            return
        running = self._running
        if self.buffered:
            if running is None and now >= self._not_before:
                self._running, self._opened = buffers.open_buffer(self.policy), now
        elif running is None and now >= self._not_before:
            self._running, self._opened = round_rules.open_round(self.policy, now), now
        elif running is None or running.state is not RoundState.SELECTING:
            self._held = round_rules.open_round(self.policy, now, held=True)

    def _step_due(self, running: round_rules.Round, now: float) -> None:
        if running.state is RoundState.SELECTING:
            # Whoever waits is counted only where that may matter.
            if now >= running.deadline or len(self.drawing.waiting) >= self.policy.cohort:
                self._step(round_rules.Waiting(len(self._candidates(running, now))), now)
        elif self._draws_more(running, now):
            self._step(round_rules.Waiting(len(self._candidates(running, now))), now)
        else:
            self._tick(now)

    def _tick(self, now: float) -> None:
        ends = self._running is not None and now >= self._running.deadline
        self._step(round_rules.Tick(len(self._open.keys() & self._unreliable.keys()) if ends else 0), now)

    def _fitting(self) -> list[int]:
        """The rows of waiting devices that this task can use."""
        if not self.drawing.shared:
            return list(self.drawing.waiting)
        return [row for row in self.drawing.waiting if not self.devices.obstacle[row]]

    def _candidates(self, round_: round_rules.Round, now: float) -> list[int]:
        waiting = self._fitting()
        if round_.state is RoundState.REPORTING:
            waiting = [row for row in waiting if row not in self._taken]
        if self._resting is not None:
            waiting = [row for row in waiting if not self._resting.is_resting(str(row), now, 0)]
        if not self._unreliable or self.buffered:
            return waiting
        return drawable(waiting, lambda row: self._unreliable.get(row, 0), round_, now)

    def _step(self, event: round_rules.Event, now: float) -> None:
        if self._running is None:
            return
        if self.buffered:
            self._running, effects = buffers.step(self._running, event)
        else:
            self._running, effects = round_rules.step(self._running, event, now)
        stepped = self._running
        for effect in effects:
            match effect:
                case round_rules.Select(count):
                    self._assign(stepped, count, now)
                case round_rules.TurnAway():
                    self.drawing.turn_away(self._candidates(stepped, now))
                case round_rules.EndAssignments(state):
                    self._end_all(state, stepped.reason or type(event).__name__.lower(), now)
        if self._running is not stepped:
            return  # it was drawn, and went on
        if stepped.state is RoundState.AGGREGATING:
            self._commit(stepped, now)
        elif stepped.state.ended:
            self._abandoned(stepped, now)

    def _commit(self, round_: round_rules.Round, now: float) -> None:
        """The next model is there: take over what is open, or begin anew."""
        devices, behind = zip(*self._reported, strict=True)
        self.course.rounds.append(CommittedRound(self._opened, self._drawn_at, now, devices, behind))
        self.times = self.times.ended(now, buffered=self.buffered)
        self._unreliable = {row: left - 1 for row, left in self._unreliable.items() if left > 1}
        self._number, self._failures = self._number + 1, 0
        stale: list[int] = []
        if self.buffered:
            fresh = buffers.drawn_in(self._number, self.settings.max_staleness)
            stale = [row for row, work in self._open.items() if work.number not in fresh]
            for row in stale:
                self._finish(row, AssignmentState.TOO_STALE, now)
            buffers.step(round_, round_rules.Aggregated(len(stale), len(self._open)))
        else:
            round_rules.step(round_, round_rules.Aggregated(), now)
        if self._resting is not None:
            self._resting.end(now, committed=True, going_on={str(row) for row in self._open})
        self._clear()
        if self.buffered:
            self._running, self._opened = buffers.open_buffer(self.policy, len(self._open)), now

    def _abandoned(self, round_: round_rules.Round, now: float) -> None:
        self.course.abandoned[round_.reason] += 1
        if round_.assigned:
            self.times = self.times.ended(now, buffered=self.buffered)
        if round_.reason in round_rules.FAILURES:
            self._failures += 1
            self._not_before = now + round_rules.back_off_s(self._failures)
            if self._failures >= self.settings.max_attempts:
                self.course.paused = now, round_.reason
        if self._resting is not None:
            self._resting.end(now, committed=False)
        self._clear()

    def _clear(self) -> None:
        self._taken, self._failing, self._reported = set(), set(), []
        self._running = self._exchanges = None

    # --- assignments

    def _assign(self, round_: round_rules.Round, count: int, now: float) -> None:
        chosen = draw(self._candidates(round_, now), count, self._source, self._unreliable.__contains__)
        for row in chosen:
            del self.drawing.waiting[row]
        rows = np.array(chosen, np.int64)
        lasts = self.devices.work_s[rows].astype(np.float64)
        if self.settings.secagg is not None:
            lasts -= self.devices.up_s[rows]  # they send nothing before an exchange of its own
            deadline = now + self.policy.reporting_deadline_s
            self._exchanges = self._exchanges or Exchanges(self.policy, self.settings.secagg, deadline)
            self._exchanges.join(chosen)
        for row, cpu_s in zip(chosen, self.devices.cpu_s[rows].tolist(), strict=True):
            self._serial += 1
            self._open[row] = _Work(self._serial, now, self._number, cpu_s)
        self._schedule(chosen, lasts, self._config.drop_out, now)
        if not self.buffered:
            self._taken.update(chosen)
        if round_.state is RoundState.CONFIGURING or round_.assigned == 0:
            self._drawn_at = now
        if not round_.replaced:
            self.times = self.times.drawn(now, buffered=self.buffered)
        if self._resting is not None:
            self._resting.add(map(str, chosen), now)
        self.drawing.drawn += count
        self.course.assigned += count
        self._step(round_rules.Configured(count), now)

    def _schedule(self, rows: list[int], lasts: Times, drop_out: float, now: float) -> None:
        """Let the open assignments of `rows` end when their devices have done what lasts so long, vanish or leave."""
        chosen, ends = np.array(rows, np.int64), now + lasts
        vanishes = self._chance.random(len(rows)) < drop_out
        ends = np.where(vanishes, now + self._chance.random(len(rows)) * lasts, ends)
        until = np.maximum(self.devices.stretches.can_until(chosen, now), now)
        # What vanishes is a process, as a rule, so its connection closes.
        silence_s, deadline = broken_after_s(lost_after_s(self.policy.cohort)), now + self.policy.reporting_deadline_s
        for row, end, leaves, gone in zip(rows, ends.tolist(), until.tolist(), vanishes.tolist(), strict=True):
            at, how = (end + silence_s, AssignmentState.LOST) if gone else (end, AssignmentState.REPORTED)
            if leaves < end:
                at, how = leaves, AssignmentState.ABORTED
            if self.buffered and deadline <= at:
                at, how = deadline, AssignmentState.EXPIRED
            heapq.heappush(self._events, (at, self._open[row].serial, row, how))

    def _end_work(self, row: int, how: AssignmentState, at: float) -> None:
        """A device reports, gives up, is lost, or is late in a buffered round."""
        running = self._running
        if running is not None and at >= running.deadline:
            self._tick(at)
            running = self._running
        work = self._open.get(row)
        if running is None or work is None:
            return
        if how is AssignmentState.REPORTED:
            self._take(row, self._number - work.number, at)
            return
        if self._exchanges is not None:
            self._exchanges.leave(row, at, lost=how is AssignmentState.LOST)
            if row in self._exchanges.masked:
                return  # its report is in the sum, so it stays until that is made
        self._finish(row, how, at)
        again = row in (self._failing if self.buffered else self._unreliable)
        self._failing.add(row)
        if self.buffered:
            self._note_unreliable([row])
        if self._resting is not None and how is not AssignmentState.EXPIRED:
            self._resting.leave(str(row))
        if how is AssignmentState.EXPIRED:
            self._step(round_rules.Expired(1, int(again)), at)
        else:
            self._step(
                round_rules.Aborted(again) if how is AssignmentState.ABORTED else round_rules.Lost(1, again=int(again)),
                at,
            )

    def _take(self, row: int, behind: int, at: float) -> None:
        """Take a report; or the answer to an exchange of a secure round, which may have gone on without its device."""
        if self._exchanges is None:
            self._finish(row, AssignmentState.REPORTED, at)
            self._reported.append((row, behind))
            if self.buffered:
                self._taken.add(row)
            self._step(round_rules.Reported(behind), at)
        elif row in self._exchanges.due:
            self._exchanges.take(row, at)
            self._exchange(at)
        else:
            self._finish(row, AssignmentState.NOT_NEEDED, at)

    # --- the exchanges of secure rounds

    def _exchange(self, now: float) -> None:
        """End the exchanges that are over, and with the last one the round."""
        while (exchanges := self._exchanges) is not None and (exchanges.short or exchanges.ends(now)):
            going = [] if exchanges.short else exchanges.go_on(now)
            self._expire(exchanges.late if exchanges.short else exchanges.late - exchanges.masked, now)
            if exchanges.short:
                self._step(round_rules.Summed(0), now)
            elif exchanges.phase is SessionPhase.OVER:
                for row in sorted(exchanges.masked):
                    self._reported.append((row, 0))
                    self._finish(row, AssignmentState.REPORTED, now)
                self._step(round_rules.Revealed(), now)
                self._step(round_rules.Summed(len(exchanges.masked)), now)
            else:
                self._ask(going, exchanges.phase, now)

    def _expire(self, late: Iterable[int], now: float) -> None:
        """Go on without devices that were late in an exchange."""
        rows = self._open.keys() & late
        again = len(rows & self._unreliable.keys())
        for row in rows:
            self._finish(row, AssignmentState.EXPIRED, now)
        if rows:
            self._failing |= rows
            self._note_unreliable(rows)
            self._step(round_rules.Expired(len(rows), again), now)

    def _ask(self, rows: list[int], phase: SessionPhase, now: float) -> None:
        """Let devices answer the next exchange, each in its time, unless it vanishes or leaves."""
        chosen = np.array(rows, np.int64)
        lasts = self._config.exchange_s * self.devices.slow[chosen].astype(np.float64)
        if phase is SessionPhase.UPLOADING:
            lasts += self.devices.up_s[chosen]
        self._schedule(rows, lasts, self._config.exchange_drop_out, now)

    def _end_all(self, state: AssignmentState, cause: str, now: float) -> None:
        """End what is open: nobody needs it any more, or it is late."""
        if cause in round_rules.HELD_UP and not self.buffered:
            self._note_unreliable(self._failing.union(self._open if state is AssignmentState.EXPIRED else ()))
        for row in list(self._open):
            self._finish(row, state, now)

    def _note_unreliable(self, rows: Iterable[int]) -> None:
        self._unreliable |= dict.fromkeys(rows, UNRELIABLE_ROUNDS + 1)

    def _finish(self, row: int, how: AssignmentState, at: float) -> None:
        work, course = self._open.pop(row), self.course
        spent_s, reports = min(work.cpu_s, at - work.since), how is AssignmentState.REPORTED
        course.ended[str(how)] += 1
        course.spent_s[row] += spent_s
        course.wasted_s += 0.0 if reports else spent_s
        course.moved[row] += self._config.bytes_down + (self._config.bytes_up if reports else 0)
        if reports:
            self._unreliable.pop(row, None)
            course.took_part[row] += 1
            course.reports.add(1, at)
        self.drawing.free.append(row)
