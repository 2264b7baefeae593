"""The funnel of a task: how many of the devices that it drew came how far, and why the others left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.rules.entities import SessionShape
from coordinator.store.records.overview import Totals


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a funnel, and its share of the whole in hundredths."""

    name: str
    count: int
    percent: float


class Funnel(NamedTuple):
    """Steps in order, and how many devices left, by reason."""

    steps: tuple[Step, ...]
    left: tuple[tuple[str, int], ...]


def of_task(totals: Totals, sessions: Sequence[SessionShape], aborts: Mapping[str, int]) -> Funnel:
    """The funnel of the rounds of a task that ended; it grows with its rounds, and stays as it is once it is over.

    sessions: the task's own. aborts: why devices aborted in its rounds, as far as it is still known.
    """
    fetched = sum(shape.count for shape in sessions if "fetched checkpoint" in shape.steps)
    reached = (
        ("assigned", totals.assigned),
        # Sessions are counted when they end, and a crash loses those of a moment.
        ("fetched the model", min(max(fetched, totals.reported), totals.assigned)),
        ("reported", totals.reported),
    )
    unknown = totals.aborted - sum(aborts.values())
    left = (
        *((f"aborted: {reason}", count) for reason, count in aborts.items()),
        ("aborted", unknown),
        ("lost", totals.lost),
        ("expired", totals.expired),
        ("too stale", totals.stale),
        ("not needed", totals.not_needed),
        ("still at work", totals.going_on),
    )
    return Funnel(shares(reached, totals.assigned), tuple((why, count) for why, count in left if count > 0))


def of_population(sessions: Sequence[SessionShape]) -> Funnel:
    """The funnel of the sessions of a population, of all its tasks and without any, and why devices were sent away."""
    everyone = sum(shape.count for shape in sessions)
    passage = ("accepted", "waited", "assigned", "fetched checkpoint", "reported")
    reached = [(step, sum(shape.count for shape in sessions if step in shape.steps)) for step in passage]
    left: dict[str, int] = {}
    for shape in sessions:
        last = shape.steps[-1]
        if last != "reported":
            left[last] = left.get(last, 0) + shape.count
    ordered = sorted(left.items(), key=lambda pair: (-pair[1], pair[0]))
    return Funnel(shares([("checked in", everyone), *reached], everyone), tuple(ordered))


def shares(steps: Iterable[tuple[str, int]], whole: int) -> tuple[Step, ...]:
    """Counts as steps, with their shares of a whole."""
    return tuple(Step(name, count, 100 * count / (whole or 1)) for name, count in steps)
