"""Training on the cohorts that a twin drew: accuracy as a function of virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from simulator.configuration import SimulationConfig
from simulator.course import ACCURACY, Point
from simulator.errors import ForecastError
from simulator.forecast.course import CommittedRound
from simulator.simulation import Overrides, simulate


def accuracy_over_time(
    config: SimulationConfig, rounds: Sequence[CommittedRound], on_round: Callable[[int, Point], None]
) -> list[tuple[float, float]]:
    """The accuracy of held-out users by hours of virtual time, after training in these rounds.

    A device holds the examples of one user, the same in every round: that of its row, modulo their number. Rounds
    beyond those of the configuration are left out. Raises ForecastError without a round, and as `simulate`.
    """
    if not rounds:
        raise ForecastError("no round was committed, so there is nothing to train: raise days, or lower goal")
    measured: list[tuple[float, float]] = []

    def heard(number: int, point: Point) -> None:
        if ACCURACY in point:
            measured.append((round(rounds[number - 1].ended / 3600, 3), point[ACCURACY]))
        on_round(number, point)

    # The twin says who trains: a size of its own would only have to fit the users.
    config = replace(config, rounds=min(config.rounds, len(rounds)), cohort=1)
    simulate(config, heard, given=Overrides(cohorts=[one.devices for one in rounds]))
    return measured
