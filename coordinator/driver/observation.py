"""Observations of tasks: read from the driver's memory now and then, written where other processes see them.

Pages, commands and metrics read them there (rules.progress). Observations hold times, not durations: while
nothing but time passes, nothing is written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from coordinator.driver.memory.check_in import CheckInLog
from coordinator.driver.memory.device_presence import Presence
from coordinator.driver.memory.loaded_task import LoadedTask
from coordinator.driver.memory.open_rounds import OpenRounds
from coordinator.driver.memory.selector import Selector
from coordinator.driver.replica_membership import Membership
from coordinator.rules.progress import GRACE_S, Observation
from coordinator.rules.states import RoundState

_LOG = logging.getLogger(__name__)
_EVERY_S = 2.0
"""A look costs no transaction, or one for all tasks when something changed."""
_REJECTIONS_S = 60.0
"""How long a change of rejections waits for a write, if nothing else changed: a rejected check-in costs none."""


class _Written(NamedTuple):
    """An observation that was written, when, and in which term of the lease: in a later term others wrote since."""

    observation: Observation
    at: float
    term: int


@dataclass(slots=True)
class Observer:
    """Looks at tasks for a driver, on its thread and its clock."""

    selector: Selector
    arrivals: CheckInLog
    presence: Presence
    _since: dict[str, float] = field(default_factory=dict)
    _written: dict[str, _Written] = field(default_factory=dict)
    _next: float = -float("inf")

    def publish(self, membership: Membership, tasks: Mapping[str, LoadedTask], rounds: OpenRounds, now: float) -> None:
        """Look at every task when it is time, and write what changed. A failure is tried again at the next look.

        It is time at once when a task is taken up: until then pages say that it starts.
        """
        working = {id_: task for id_, task in tasks.items() if task.active or id_ in rounds.running}
        if now < self._next and working.keys() <= self._since.keys():
            return
        self._next = now + _EVERY_S
        self._written = {task: written for task, written in self._written.items() if task in working}
        self._since = {task: self._since.get(task, now) for task in working}
        seen = {id_: self._look(task, rounds, now) for id_, task in working.items()}
        terms = {id_: membership.term(task.population) for id_, task in working.items()}
        changed = {id_: look for id_, look in seen.items() if self._is_news(id_, look, terms[id_], now)}
        if not changed:
            return
        try:
            with membership.writing() as records:
                for task, observation in changed.items():
                    records.observations.write(task, membership.id, observation.later(records.at - now))
        except Exception as error:
            # The driver's own transactions find out what is wrong, and do something about it.
            _LOG.debug("the observations of %d tasks could not be written: %s", len(changed), error)
            return
        self._written |= {task: _Written(observation, now, terms[task]) for task, observation in changed.items()}

    def _is_news(self, task: str, seen: Observation, term: int, now: float) -> bool:
        written = self._written.get(task)
        if written is None or written.term != term:
            return True
        if now < written.at + _REJECTIONS_S:
            seen = replace(seen, rejected=written.observation.rejected)
        return seen != written.observation

    def _look(self, task: LoadedTask, rounds: OpenRounds, now: float) -> Observation:
        running, members = rounds.running.get(task.id), rounds.members(task.id)
        seen = Observation(
            members=None if members is None else len(members),
            since=self._since[task.id],
            begins_at=rounds.not_before.get(task.id),
            accepted_at=self.arrivals.accepted_at(task.population),
        )
        if running is not None and running.value.state is not RoundState.SELECTING:
            silence = self.presence.silence(running.id, GRACE_S)
            phase, answered, asked = running.secure.standing if running.secure else ("", 0, 0)
            seen = replace(seen, silent=silence.devices, silent_since=silence.since)
            seen = replace(seen, phase=phase, answered=answered, asked=asked)
            if not seen.silent and not running.draws_more(now):
                # Devices for the next round: how many wait changes all the time, and means nothing.
                return seen
        waiting = self._waiting(task, rounds, now)
        eligible, rejected = waiting.pop("", 0), dict(self.arrivals.lately(task.id, now))
        return replace(seen, eligible=eligible, ineligible=waiting, rejected=rejected)

    def _waiting(self, task: LoadedTask, rounds: OpenRounds, now: float) -> dict[str, int]:
        """How many devices wait, by the obstacle between them and a task; "" is those that could be drawn."""
        sessions, running = self.selector.sessions, rounds.running.get(task.id)
        obstacles = sessions.obstacles(task.population, task.id, task.needs)
        replacing = running is not None and running.reporting
        drawn = running.devices if running is not None and replacing else frozenset()
        left_out = self.selector.left_out(task, rounds, 0 if replacing else rounds.rounds_before_draw(task.id)) - drawn
        members = rounds.members(task.id)
        unreliable, separated = rounds.unreliable.get(task.id), task.settings.separation is not None
        if not (replacing or left_out or unreliable or members is not None or separated):
            return dict(obstacles)
        round_ = running or rounds.held.get(task.id)
        if round_ is None:
            in_time = eligible = len(self.selector.eligible(task, rounds, now))
        else:
            in_time = len(self.selector.in_time(round_, rounds, now))
            eligible = len(self.selector.candidates(round_, rounds, now))
        fitting = [session.device for session in sessions.eligible(task.population, task.id, task.needs)]
        again, left = sum(device in drawn for device in fitting), sum(device in left_out for device in fitting)
        others = 0 if members is None else sum(device not in members | left_out for device in fitting)
        resting = obstacles[""] - again - left - others - in_time
        why = {"again": again, "left-out": left, "other-cohort": others, "resting": resting}
        why |= {"unreliable": in_time - eligible}
        return dict(obstacles + Counter({"": eligible - obstacles[""]} | why))
