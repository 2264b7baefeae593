"""The terms of a secure round: the invitation to it, its sizes and its times. Spec: docs/spec/wire.md §8."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.rules.packed_segments import packed_segments
from coordinator.rules.rounds import RoundPolicy
from coordinator.rules.task_settings import PHASES_AFTER_TRAINING, Secagg, TaskSettings
from fedcore.masking import greatest_weight, layout_hash, model_hash, session_number, task_hash
from fedcore.plan import Plan
from fedcore.wire.messages import Assignment
from secagg.messages import ACTIVE, Invite


def invitation(
    settings: TaskSettings, policy: RoundPolicy, plan: Plan, assignment: Assignment, deadline: int
) -> Invite:
    """The content of M0 for an assignment's round. deadline: in Unix seconds. The task must ask for masked reports."""
    bounds, secagg = settings.sum_bounds, settings.secagg or Secagg()
    largest = min(policy.cohort, secagg.group_size)
    return Invite(
        mode=ACTIVE,
        task=task_hash(assignment.task),
        round=session_number(assignment.round, assignment.attempt),
        deadline=deadline,
        n_max=largest,
        min_sum=bounds.min_sum,
        w_max=greatest_weight(plan.report, bounds),
        layout_hash=layout_hash(plan.report, assignment.seed),
        model_hash=model_hash(assignment.plan, assignment.checkpoint),
        segments=packed_segments(plan.report, bounds, largest),
    )


@dataclass(frozen=True, slots=True)
class SecureRoundSettings:
    """Sizes and times of a round: fewer than `minimum` devices in all do not count, more than `group_size` are divided.

    Training ends at `training_deadline`, or `phase_s` after `goal` devices came; every other phase after `phase_s`, and
    all of them at `deadline`.
    """

    goal: int
    minimum: int
    group_size: int
    training_deadline: float
    phase_s: float
    deadline: float

    @classmethod
    def of(cls, secagg: Secagg | None, policy: RoundPolicy, deadline: float) -> SecureRoundSettings:
        """The settings of a round whose reporting deadline is this, on the driver's clock."""
        secagg = secagg or Secagg()
        training_deadline = deadline - PHASES_AFTER_TRAINING * secagg.phase_s
        return cls(policy.goal, policy.minimum, secagg.group_size, training_deadline, secagg.phase_s, deadline)
