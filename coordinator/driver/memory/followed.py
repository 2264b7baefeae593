"""Populations that another replica drives: their devices are sent away here, by the last notice of their driver.

Whoever a task may use is passed on to the driver. So this knows of no session, no round and no device that rests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from coordinator.commands import CheckInDevice
from coordinator.driver.memory.pace_steering import bounded
from coordinator.driver.memory.returns import Returns, Told
from coordinator.rules.notices import Notice, Tally
from coordinator.rules.pacing import IDLE_PER_S, away
from coordinator.rules.return_tokens import Return
from coordinator.rules.selection import unfit
from fedcore.wire.messages import Rejected, RetryWindow

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
