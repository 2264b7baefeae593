"""The privacy budget of a population: what its tasks together reveal of one device at most, and who may still spend.

Pure. What counts, and how it adds up: docs/decisions/0048-privacy-ledger-and-budget.md.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec

from coordinator.errors import BudgetExceeded, InvalidBudget
from coordinator.rules.entities import Task
from coordinator.rules.kinds import Kind, least_shown
from coordinator.rules.private_sums import planned
from coordinator.rules.states import TaskState
from fedcore.privacy.accounting import Loss, loss_of_rounds
from fedcore.privacy.settings import MOST_TREE_ROUNDS, Noise, Privacy
from fedcore.validation import check, checked, demand, setting

CLAIM = (
    "one device that is in as many rounds as its tasks allow; a device that enrols anew is a new one, a device of "
    "several populations has a budget in each, and a task without privacy has no bound"
)
"""What the ε of a population is of, for people."""
_MOST_EPSILON = 1e6
"""Above it a budget is none."""
_MOST_NAMED = 3
"""Tasks that a refusal names; `muster privacy budget` has all."""
_LONGEST_POPULATION = 200


@checked(InvalidBudget)
@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationBudget:
    """The (ε, δ) that all tasks of a population together may spend on any one device, and what questions may show.

    minimum_devices bounds what readers of an answer see, not the operator, who has the sum.
    """

    epsilon: Annotated[float, setting("Most that all tasks may say of a device.", gt=0, le=_MOST_EPSILON)]
    delta: Annotated[float, setting("Chance that epsilon leaves open, below 1 / users.", gt=0, lt=1)]
    minimum_devices: Annotated[int, setting("Least devices of a group that a question shows.", ge=1, le=2**31 - 1)] = 1

    def __post_init__(self) -> None:
        check(self)

    @property
    def words(self) -> str:
        """The budget for people."""
        groups = f", no group of fewer than {self.minimum_devices} devices" if self.minimum_devices > 1 else ""
        return f"ε {self.epsilon:g} at δ {self.delta:g}{groups}"


class Counted(NamedTuple):
    """A task, and what counts of it.

    committed: the number of its last committed round. live: whether a round of it runs. rows: noisy sums that left.
    """

    task: Task
    committed: int
    live: bool
    rows: int

    @classmethod
    def new(cls, task: Task) -> Counted:
        """A task that is to begin."""
        return cls(task, 0, False, 0)

    @property
    def rounds(self) -> int:
        """The noisy sums that it has released and may still release; 0 for a task without privacy.

        A task that was cancelled while a round ran may release one more: that its sum led to no model says something.
        """
        settings = self.task.settings
        if settings.privacy is None:
            return 0
        if self.task.state.ended:
            return self.rows + int(self.live)
        most = self.rows + max(settings.rounds - self.committed, int(self.live))
        return _within(settings.promise, self.rows, most)

    @property
    def loss(self) -> Loss:
        """What all of these sums reveal of a device that is in as many as the task allows."""
        settings = self.task.settings
        if settings.privacy is None:
            left_nothing = self.task.state.ended and not self.committed
            return Loss() if left_nothing else Loss.unbounded()
        return _loss(planned(settings, settings.promise), self.rounds)

    def draws(self, place: float) -> bool:
        """Whether the task draws devices whose hash is at `place`, from 0 to 1 (`fedcore.batching`)."""
        settings = self.task.settings
        return (place < settings.hold_out_devices) is settings.on_held_out


class TaskSpending(msgspec.Struct, frozen=True):
    """What a task counts as in the budget of its population. None stands for no bound.

    epsilon: by itself. adds: to the ε of all tasks before it, of the device with the most. released, rounds: noisy sums
    that left, and those with the ones that may still follow.
    """

    task: str
    name: str
    kind: Kind
    state: TaskState
    mechanism: str
    epsilon: float | None
    adds: float | None
    released: int
    rounds: int


class BudgetReport(msgspec.Struct, frozen=True):
    """The ε that one device of a population may have spent at most, by all tasks there were. None stands for no bound.

    delta: that of the budget, or else the least of the tasks'; None where no task is private. left: None without a
    budget.
    """

    population: str
    budget: PopulationBudget | None
    delta: float | None
    epsilon: float | None
    left: float | None
    tasks: tuple[TaskSpending, ...]


def in_words(epsilon: float | None) -> str:
    """An ε of a report for people."""
    return "no bound" if epsilon is None else f"{epsilon:.4g}"


def check_population(name: str) -> str:
    """The name, if a population may have it. Raises InvalidBudget."""
    fits = 0 < len(name) <= _LONGEST_POPULATION and name.isprintable()
    demand(InvalidBudget, fits, "population", f"a name of 1 to {_LONGEST_POPULATION} printable characters", name)
    return name


def report(
    population: str, budget: PopulationBudget | None, counted: Sequence[Counted], kinds: Mapping[str, Kind]
) -> BudgetReport:
    """What the tasks of a population, oldest first, reveal together. kinds: of every task, by id.

    Raises PrivacyError without an accountant.
    """
    deltas = [one.task.settings.privacy.delta for one in counted if one.task.settings.privacy is not None]
    delta = budget.delta if budget else min(deltas, default=None)
    totals = _totals(counted, delta)
    spendings = [
        TaskSpending(
            task=one.task.id,
            name=one.task.name,
            kind=kinds[one.task.id],
            state=one.task.state,
            mechanism=one.task.settings.privacy.mechanism if one.task.settings.privacy else "",
            epsilon=_bounded(_epsilon(one.loss, delta)),
            adds=_bounded(after - before if math.isfinite(after) else math.inf) if after > before else 0.0,
            released=one.rows,
            rounds=one.rounds,
        )
        for one, before, after in zip(counted, totals, totals[1:], strict=False)
    ]
    left = None if budget is None else max(budget.epsilon - totals[-1], 0.0)
    return BudgetReport(population, budget, delta, _bounded(totals[-1]), left, tuple(spendings))


def check_room(budget: PopulationBudget | None, counted: Sequence[Counted], new: Counted) -> None:
    """Raise BudgetExceeded if a task, with the rounds that it is to have, would exceed the budget of its population.

    counted: the other tasks of the population.
    """
    if budget is None:
        return
    population, task = new.task.settings.population, new.task
    shown = least_shown(task.algorithm)
    if shown is not None and shown < budget.minimum_devices:
        raise BudgetExceeded(
            f"population {population!r} has no group shown of fewer than {budget.minimum_devices} devices, and this "
            f"question shows groups of {shown}: ask with --minimum-devices {budget.minimum_devices}"
        )
    before, after = _epsilon_of(counted, budget.delta), _epsilon_of([*counted, new], budget.delta)
    if after <= budget.epsilon:
        return
    left = f"ε {max(budget.epsilon - before, 0.0):.4g} of {budget.epsilon:g} is left at δ {budget.delta:g}"
    if task.settings.privacy is None:
        need = f"{task.name!r} promises no privacy, which no budget covers: give it privacy, --privacy epsilon=…"
    else:
        need = f"{task.name!r} needs {after - before:.4g}, with all rounds that it may do"
    raise BudgetExceeded(f"in population {population!r} {left}, and {need}; {_spenders(population, counted, budget)}")


def check_lowered(population: str, budget: PopulationBudget, counted: Sequence[Counted]) -> None:
    """Raise InvalidBudget if the tasks of a population have spent more than a budget, or may still."""
    spent = _epsilon_of(counted, budget.delta)
    if spent > budget.epsilon:
        least = f"at least {spent:.4g}, which the tasks of population {population!r} may have spent"
        allowed = least if math.isfinite(spent) else f"of another population: {population!r} has tasks without privacy"
        raise InvalidBudget(
            f"epsilon must be {allowed} at δ {budget.delta:g}, not {budget.epsilon:g}; "
            f"{_spenders(population, counted, budget)}"
        )


def _spenders(population: str, counted: Sequence[Counted], budget: PopulationBudget) -> str:
    """The tasks that spend most, in words."""
    spent = [(epsilon, one.task) for one in counted if (epsilon := _epsilon(one.loss, budget.delta)) > 0]
    most = sorted(spent, key=lambda each: -each[0])[:_MOST_NAMED]
    if not most:
        return "no task has spent any"
    words = ", ".join(f"{task.name!r} ({task.id}) {epsilon:.4g}" for epsilon, task in most)
    more = f" and {len(spent) - len(most)} more" if len(spent) > len(most) else ""
    return f"spent by {words}{more}: muster privacy budget --population {shlex.quote(population)}"


def _epsilon_of(counted: Sequence[Counted], delta: float) -> float:
    """ε of all tasks together: of the device, wherever its hash lies, with the most."""
    return max(
        _epsilon(sum((one.loss for one in counted if one.draws(place)), Loss()), delta) for place in _places(counted)
    )


def _totals(counted: Sequence[Counted], delta: float | None) -> list[float]:
    """The same of the first n tasks, n from 0."""
    lines = []
    for place in _places(counted):
        losses = (one.loss if one.draws(place) else Loss() for one in counted)
        lines.append([_epsilon(loss, delta) for loss in accumulate(losses, initial=Loss())])
    return [max(together) for together in zip(*lines, strict=True)]


def _places(counted: Sequence[Counted]) -> set[float]:
    """A place on the line of hashes for each set of tasks that may draw one device."""
    return {0.0, *(one.task.settings.hold_out_devices for one in counted)}


def _within(promise: Privacy, least: int, most: int) -> int:
    """The most noisy sums, from `least` to `most`, that a task's own budget lets it release.

    Steps of masked values are taken as infinitely fine here, so that it is no less than what the task may do.
    """
    most = max(least, min(most, MOST_TREE_ROUNDS) if promise.mechanism == "tree" else most)
    if _epsilon(_loss(promise, most), promise.delta) <= promise.epsilon:
        return most
    while most - least > 1:
        middle = (least + most) // 2
        fits = _epsilon(_loss(promise, middle), promise.delta) <= promise.epsilon
        least, most = (middle, most) if fits else (least, middle)
    return least


@lru_cache(maxsize=1000)
def _loss(noise: Noise, rounds: int) -> Loss:
    return loss_of_rounds(noise, rounds)


@lru_cache(maxsize=4000)  # the sums over tasks that are over stay as they are
def _epsilon(loss: Loss, delta: float | None) -> float:
    # A loss that needs no δ has the same ε at any.
    return loss.epsilon(0.5 if delta is None else delta)


def _bounded(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
