"""The configuration of a forecast: settings that describe themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from coordinator.rules.eligibility import Requires
from coordinator.rules.rounds import RoundPolicy
from coordinator.rules.selection import Needs
from fedcore.privacy.settings import WholeFromOne
from fedcore.validation import Count, Fraction, check, checked, setting
from simulator.errors import ForecastError

FORMAT = "onnx"
COLLECTION = "examples"


@checked(ForecastError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    """A population, a plan's costs and a task's policy. Raises ForecastError naming the setting and what it may be.

    Speeds, bandwidths and numbers of examples are log-normal around their medians. A device is charged and idle once a
    day, on most days, in a stretch around its own time of the evening.
    """

    devices: Annotated[int, setting("Devices in the population.", ge=1, le=100_000_000)] = 10_000
    days: Annotated[int, setting("Virtual days.", ge=1, le=366)] = 1
    goal: Annotated[WholeFromOne, setting("Reports that a round wants.")] = 100
    minimum: Annotated[WholeFromOne, setting("Fewest reports that count; by default the goal.")] | None = None
    over_selection: Annotated[float, setting("Devices drawn per report wanted.", ge=1, le=100)] = 1.3
    selection_timeout_s: Annotated[float, setting("How long a round waits for devices.", unit="seconds", gt=0)] = 60.0
    reporting_deadline_s: Annotated[float, setting("How long a round waits for reports.", unit="seconds", gt=0)] = 600.0
    until_round: Annotated[WholeFromOne, setting("The round of which to tell the date.")] = 100
    time_zones: Annotated[int, setting("Time zones, an hour apart, with equal shares.", ge=1, le=24)] = 24
    charging_s: Annotated[
        float, setting("Median stretch for which a device can come.", unit="seconds", gt=0, le=86_400)
    ] = 21_600.0
    charges: Annotated[float, setting("Chance that a device is charged on a day.", gt=0, le=1)] = 0.8
    unmetered: Annotated[Fraction, setting("Share of devices whose network costs nothing.")] = 0.9
    needs_unmetered: Annotated[bool, setting("Draw only devices whose network costs nothing.")] = True
    median_examples: Annotated[float, setting("Median of examples on a device.", gt=0, le=1e9)] = 100.0
    min_examples: Annotated[Count, setting("Fewest examples for a device to be drawn.")] = 0
    example_s: Annotated[float, setting("CPU time of an example, median device.", unit="seconds", gt=0)] = 1.0
    speed_spread: Annotated[float, setting("Deviation of the logarithm of speed.", ge=0, le=5)] = 0.5
    bytes_down: Annotated[Count, setting("Download of an assignment.", unit="bytes")] = 1_000_000
    bytes_up: Annotated[Count, setting("Size of a report.", unit="bytes")] = 1_000_000
    bandwidth: Annotated[float, setting("Median bandwidth, in bytes a second.", gt=0, le=1e12)] = 500_000.0
    drop_out: Annotated[Fraction, setting("Chance that a device vanishes during an assignment.")] = 0.05
    seed: Annotated[Count, setting("Seed of every draw.")] = 0

    def __post_init__(self) -> None:
        check(self)
        if self.minimum is not None and self.minimum > self.goal:
            raise ForecastError(f"minimum must be at most goal ({self.goal}), not {self.minimum}")

    @property
    def policy(self) -> RoundPolicy:
        """The policy of the task's rounds."""
        minimum = self.goal if self.minimum is None else self.minimum
        return RoundPolicy(self.goal, minimum, self.over_selection, self.selection_timeout_s, self.reporting_deadline_s)

    @property
    def needs(self) -> Needs:
        """The task's needs of a device."""
        return Needs(
            frozenset({FORMAT}), COLLECTION, self.min_examples, Requires(charging=True, unmetered=self.needs_unmetered)
        )
