"""The course of a simulation: one point for each round, and the conditions for its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.progress import START
from coordinator.rules.task_settings import MOST_LOSS_GROWTH
from simulator.engines.memory import DIVERGED
from simulator.population import Population
from simulator.training import PerUser

Point = dict[str, int | float]
"""A round: its number `round`, its metrics, and the measurements of held-out users after it, if any (`measured`)."""

Ending = Literal["rounds", "target_accuracy", "patience"]
"""The reason for the end: all rounds ran, the target accuracy was reached, or the loss stopped falling."""

PERCENTILES = (5, 25, 50, 75, 95)
LOSS, ACCURACY, USER_MEAN, PER_USER = "test.loss", "test.accuracy", "test.user_mean", "test.user_p"
_WATCHED = ("train.loss", LOSS)


def measured(per_user: PerUser, test: Population) -> Point:
    """The measurements of held-out users, as a part of a point.

    `test.loss` and `test.accuracy` are means over examples. `test.user_mean` is the mean over users of their accuracy,
    `test.user_p5` to `test.user_p95` its percentiles; of their loss, where the model has no accuracy.
    """
    point: Point = {f"test.{name}": overall(values, test) for name, values in per_user.items()}
    ranked = per_user.get("accuracy", per_user["loss"])
    point[USER_MEAN] = float(ranked.mean())
    return point | {f"{PER_USER}{percent}": float(np.percentile(ranked, percent)) for percent in PERCENTILES}


def overall(per_user: NDArray[np.float64], population: Population) -> float:
    """The per-example mean of a per-user mean."""
    return float(np.average(per_user, weights=population.sizes))


def noting() -> Callable[[Point], str]:
    """What says of each point in order its training loss, and what held-out users measured last."""
    last: dict[str, str] = {}

    def note(point: Point) -> str:
        loss = next(value for name, value in point.items() if name.endswith(".loss"))
        for name, words in ((LOSS, "held-out loss"), (ACCURACY, "accuracy")):
            if name in point:
                last[name] = f"{words} {point[name]:.3f}"
        return ", ".join([f"train loss {loss:.3f}", *last.values()])

    return note


@dataclass(frozen=True, slots=True)
class Limits:
    """The conditions for the end of a simulation.

    rounds: the most rounds. target_accuracy: the held-out accuracy at which it ends. patience: it ends this many rounds
    after the lowest held-out loss. Both are checked whenever the users measure.
    """

    rounds: int
    target_accuracy: float | None
    patience: int | None

    def ending(self, course: Sequence[Point]) -> Ending | None:
        """The reason to end the simulation after these rounds, or None if it continues."""
        if course and LOSS in course[-1]:
            last = course[-1]
            if self.target_accuracy is not None and last[ACCURACY] >= self.target_accuracy:
                return "target_accuracy"
            if self.patience is not None:
                best = min((point for point in course if LOSS in point), key=lambda point: point[LOSS])
                if last["round"] - best["round"] >= self.patience:
                    return "patience"
        return "rounds" if len(course) >= self.rounds else None


class Watch:
    """A look-out for a loss that explodes. words: how one did first; None until then.

    It is held against the loss before training, or against its first value where that is not known.
    """

    def __init__(self, course: Iterable[Point] = ()) -> None:
        self.words: str | None = None
        self._first: dict[str, float] = {}
        for point in course:
            self.look(point)

    def look(self, point: Point) -> bool:
        """Whether a loss of this point, the next one, is the first that explodes."""
        if START in point:
            self._first[START] = point[START]
        for name in (name for name in _WATCHED if name in point and self.words is None):
            value, first = point[name], self._first.setdefault(name, self._first.get(START, point[name]))
            if not math.isfinite(value) or value > MOST_LOSS_GROWTH * abs(first) > 0:
                self.words = f"round {point['round']}: {name} is {value:.4g}, and was {first:.4g} at first: {DIVERGED}"
                return True
        return False
