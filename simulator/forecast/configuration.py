"""The configuration of a forecast: settings that describe themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from coordinator.rules.states import Requires
from coordinator.rules.task_settings import TARGET, Buffered, Secagg, TaskSettings
from fedcore.privacy.settings import WholeFromOne
from fedcore.validation import Count, Fraction, build, check, checked, setting
from simulator.errors import ForecastError
from simulator.labels import Shares, label_shares

OF_POPULATION = (
    *(
        "devices",
        "days",
        "first_within_s",
        "retry_min_s",
        "retry_max_s",
        "time_zones",
        "charging_s",
        "trace",
        "charges",
    ),
    *("labels", "unmetered", "median_examples", "speed_spread", "bandwidth", "step_s", "seed"),
)
"""Settings that all tasks of a population have in common."""


@checked(ForecastError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    """A population, a plan's costs and a task's policy. Raises ForecastError naming the setting and what it may be.

    Speeds, bandwidths and numbers of examples are log-normal around their medians. A device is charged and idle once a
    day, on most days, in a stretch around its own time of the evening. Policies that cannot be raise InvalidTask.
    """

    devices: Annotated[int, setting("Devices in the population.", ge=1, le=100_000_000)] = 10_000
    days: Annotated[int, setting("Virtual days.", ge=1, le=366)] = 1
    goal: Annotated[WholeFromOne, setting("Reports that a round wants.")] = 100
    minimum: Annotated[WholeFromOne, setting("Fewest reports that count; by default the goal.")] | None = None
    over_selection: Annotated[float, setting("Devices drawn per report wanted.", ge=1, le=100)] = 1.3
    selection_timeout_s: Annotated[float, setting("How long a round waits for devices.", unit="seconds", gt=0)] = 60.0
    reporting_deadline_s: Annotated[float, setting("How long a round waits for reports.", unit="seconds", gt=0)] = 600.0
    concurrency: Annotated[Count, setting("Devices at work at once in buffered rounds; 0 for rounds of cohorts.")] = 0
    secagg_phase_s: Annotated[
        float, setting("How long each exchange of secure rounds waits for devices; 0 for clear reports.", ge=0, le=3600)
    ] = 0.0
    exchange_s: Annotated[
        float, setting("Time of an exchange of a secure round on the median device.", unit="seconds", ge=0, le=3600)
    ] = 1.0
    exchange_drop_out: Annotated[Fraction, setting("Chance that a device vanishes in each of these exchanges.")] = 0.005
    max_staleness: Annotated[Count, setting("With concurrency: most versions that a report may be behind.")] = 50
    min_separation_s: Annotated[
        float, setting("Least time between two participations of a device.", unit="seconds", ge=0)
    ] = 0.0
    min_separation_rounds: Annotated[WholeFromOne, setting("Least rounds between two participations.")] = 1
    max_attempts: Annotated[WholeFromOne, setting("Failed attempts at a round that pause the task.")] = 5
    rounds: Annotated[WholeFromOne, setting("Committed rounds of which to tell the date.")] = 100
    first_within_s: Annotated[
        float, setting("Within which all devices look in for the first time.", unit="seconds", gt=0, le=86_400)
    ] = 3600.0
    retry_min_s: Annotated[
        float, setting("Earliest return of a device, as coordinators have it.", unit="seconds", ge=0, le=86_400)
    ] = 5.0
    retry_max_s: Annotated[
        float, setting("Latest return of a device, as coordinators have it.", unit="seconds", ge=0, le=86_400)
    ] = 86_400.0
    time_zones: Annotated[int, setting("Time zones, an hour apart, with equal shares.", ge=1, le=24)] = 24
    charging_s: Annotated[
        float, setting("Median stretch for which a device can come.", unit="seconds", gt=0, le=86_400)
    ] = 21_600.0
    trace: (
        Annotated[Path, setting("CSV of device,start_s,end_s: when devices can come, in place of nights.")] | None
    ) = None
    charges: Annotated[float, setting("Chance that a device is charged on a day.", ge=0.01, le=1)] = 0.8
    unmetered: Annotated[Fraction, setting("Share of devices whose network costs nothing.")] = 0.9
    labels: Annotated[
        tuple[str, ...],
        setting("Labels, with the share of devices that tell them.", allowed="as region=eu:0.3, at most 1 for a name"),
    ] = ()
    where: Annotated[str, setting("Devices that the task wants.", allowed=TARGET)] = ""
    needs_unmetered: Annotated[bool, setting("Draw only devices whose network costs nothing.")] = False
    median_examples: Annotated[float, setting("Median of examples on a device.", gt=0, le=1e9)] = 100.0
    min_examples: Annotated[WholeFromOne, setting("Examples a device needs.")] = 1
    example_s: Annotated[float, setting("Time of an example on the median device.", unit="seconds", gt=0)] = 0.1
    speed_spread: Annotated[float, setting("Deviation of the logarithm of speed.", ge=0, le=5)] = 0.5
    bytes_down: Annotated[Count, setting("Download of an assignment.", unit="bytes")] = 1_000_000
    bytes_up: Annotated[Count, setting("Size of a report.", unit="bytes")] = 1_000_000
    bandwidth: Annotated[float, setting("Median bandwidth, in bytes a second.", gt=0, le=1e12)] = 500_000.0
    drop_out: Annotated[Fraction, setting("Chance that a device vanishes during an assignment.")] = 0.05
    step_s: Annotated[float, setting("How fine virtual time is.", unit="seconds", ge=0.01, le=10)] = 1.0
    seed: Annotated[Count, setting("Seed of every draw.")] = 0

    def __post_init__(self) -> None:
        check(self)
        self.shares  # noqa: B018 - as are labels
        self.task  # noqa: B018 - a policy that cannot be is refused now

    @property
    def shares(self) -> Shares:
        """The shares of devices that tell each label."""
        try:
            return label_shares(self.labels)
        except ValueError as error:
            raise ForecastError(str(error)) from error

    def beside(self, given: Mapping[str, Any]) -> ForecastConfig:
        """The configuration of another task of the same population, of its settings by name. Raises as the class."""
        if shared := [name for name in given if name in OF_POPULATION]:
            raise ForecastError(f"{shared[0]} is of the population, which its tasks share: leave it out beside")
        names = {one.name for one in fields(ForecastConfig)}
        if missing := [one.name for one in fields(TaskSettings) if one.name in given and one.name not in names]:
            raise ForecastError(f"a forecast does not model {missing[0]}, which tasks have: leave it out")
        return build(ForecastConfig, {name: getattr(self, name) for name in OF_POPULATION} | dict(given))

    @property
    def task(self) -> TaskSettings:
        """The settings of the task."""
        own = {one.name for one in fields(ForecastConfig)} - {*OF_POPULATION}
        return TaskSettings(
            **{one.name: getattr(self, one.name) for one in fields(TaskSettings) if one.name in own},
            population="forecast",
            requires=Requires(charging=True, idle=True, unmetered=self.needs_unmetered),
            buffered=Buffered(concurrency=self.concurrency, max_staleness=self.max_staleness)
            if self.concurrency
            else None,
            secagg=Secagg(phase_s=self.secagg_phase_s) if self.secagg_phase_s else None,
        )
