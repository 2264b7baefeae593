"""Memory of a driver: all that its thread keeps between turns. The store's rows are the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coordinator.driver.memory.check_in import CheckIns
from coordinator.driver.memory.device_presence import Presence
from coordinator.driver.memory.loaded_task import LoadedTask
from coordinator.driver.memory.open_rounds import OpenRound, OpenRounds
from coordinator.driver.memory.pace_steering import Steering
from coordinator.driver.memory.round_sums import RoundSum, SecureRounds, SharedSums
from coordinator.driver.memory.selector import ParticipationLimit
from coordinator.driver.memory.sessions import Sessions
from coordinator.errors import DeviceRevoked, Unavailable
from coordinator.rules.aggregation import collector
from coordinator.tally import ModelTally, SessionCounts
from fedcore.wire.messages import RetryWindow


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
