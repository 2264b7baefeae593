"""Options of `muster task create`: a task's settings, with the settings' own defaults, and its release."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.options.privacy import PrivacyParts, parse_privacy
from muster.options.schedule import Schedule, parse_schedule

if TYPE_CHECKING:
    from coordinator.rules.task_settings import Buffered, Secagg, TaskSettings

MODE = "Draw a cohort for every round, or take whoever comes and make a model of every --goal reports."
DEADLINE = "How long a round waits for reports. With --secagg, 5 × phase-s of it are for the phases after the training."
REQUIRE = (
    "What a device must say of itself, or it is rejected: charging, idle, unmetered, min_battery=0.4, "
    "min_free_storage_bytes=500000000, min_memory_bytes=2000000000, min_version=0.2; with commas between, repeatable."
)
ON_DEVICE = (
    "What a device checks alone, and tells nobody: charging, idle, unmetered, min_battery=0.4, "
    "min_free_storage_bytes=500000000, min_examples=20, max_example_age_s=604800 (no older examples count). The "
    "coordinator hears for which tasks a device is willing, and never why not."
)
ReleaseKey = Annotated[
    Path | None,
    typer.Option(
        metavar="KEYFILE", help="With --secagg: the private key that releases the plan, from `muster key new`."
    ),
]
ReleaseCounter = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --secagg: a device refuses a counter below the last that it saw of the key.",
    ),
]
ReleaseDays = Annotated[int, typer.Option(min=1, max=3650, help="With --secagg: days that the release is good for.")]


class Default:
    """The default of a setting, read when it is asked for: to list the commands must load nothing heavy.

    part: the part of TaskSettings that has it, if it is not TaskSettings itself.
    """

    def __init__(self, name: str, part: str = "TaskSettings") -> None:
        self._name, self._part = name, part

    def __call__(self) -> Any:
        """The value."""
        from coordinator.rules import task_settings

        fields = dataclasses.fields(getattr(task_settings, self._part))
        return next(field.default for field in fields if field.name == self._name)

    def __str__(self) -> str:
        found = self()
        return ", ".join(found) if isinstance(found, tuple) else str(found)


def setting(name: str, about: str) -> Any:
    """An option for a field of TaskSettings, with its default."""
    return typer.Option(help=about, default_factory=Default(name))


def secagg_setting(name: str, about: str) -> Any:
    """An option for a field of Secagg, with its default."""
    return typer.Option(help=f"With --secagg: {about}", default_factory=Default(name, "Secagg"))


def clear_setting(name: str, about: str) -> Any:
    """An option for a field of ClearReports, with its default."""
    return typer.Option(help=f"Without --secagg: {about}", default_factory=Default(name, "ClearReports"))


def buffered_setting(name: str, about: str) -> Any:
    """An option for a field of Buffered, with its default."""
    return typer.Option(help=f"If buffered: {about}", default_factory=Default(name, "Buffered"))


class Mode(StrEnum):
    """How rounds get their reports."""

    SYNCHRONOUS = "synchronous"
    BUFFERED = "buffered"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """A task's settings as options."""

    population: Annotated[str, typer.Option(help="Whose devices take part.")]
    goal: Annotated[int, typer.Option(help="Reports that end a round.")]
    rounds: Annotated[int, typer.Option(help="Rounds to commit.")]
    mode: Annotated[Mode, typer.Option(help=MODE)] = Mode.SYNCHRONOUS
    concurrency: Annotated[int, buffered_setting("concurrency", "most devices at work at once.")]
    max_staleness: Annotated[int, buffered_setting("max_staleness", "most versions that a report may be behind.")]
    minimum: Annotated[int | None, typer.Option(help="Reports a round needs.  [default: the goal]")] = None
    over_selection: Annotated[float, setting("over_selection", "Devices drawn per report.")]
    selection_timeout_s: Annotated[float, setting("selection_timeout_s", "How long a round waits for devices.")]
    reporting_deadline_s: Annotated[float, setting("reporting_deadline_s", DEADLINE)]
    max_attempts: Annotated[int, setting("max_attempts", "Failed attempts at a round that pause the task.")]
    max_loss_growth: Annotated[
        float, setting("max_loss_growth", "Pause when the loss exceeds this multiple of its first values; 0: never.")
    ]
    min_examples: Annotated[int, setting("min_examples", "Examples a device must hold.")]
    min_separation_s: Annotated[
        float, setting("min_separation_s", "Least seconds between two participations of a device.")
    ]
    min_separation_rounds: Annotated[
        int,
        setting("min_separation_rounds", "Rounds from one participation of a device to its next, at least; 1 is none."),
    ]
    schedule: Schedule = None
    privacy: PrivacyParts = None
    same_cohort: Annotated[
        bool,
        typer.Option(
            "--same-cohort",
            help="Of two trips: draw for the second only devices that the first counted.",
        ),
    ] = False
    require: Annotated[list[str] | None, typer.Option(metavar="RULES", help=REQUIRE)] = None
    on_device: Annotated[list[str] | None, typer.Option(metavar="RULES", help=ON_DEVICE)] = None
    seed: Annotated[int, setting("seed", "Key of random numbers.")]
    formats: Annotated[
        list[str],
        typer.Option(
            "--format", help="Format that the plan must have; repeatable.", default_factory=Default("formats")
        ),
    ]
    max_rss_mb: Annotated[float | None, typer.Option(help="Memory that a device can spare, in MB.")] = None
    max_step_ms: Annotated[float | None, typer.Option(help="CPU time that a step may take, in ms.")] = None
    max_graph_mb: Annotated[float | None, typer.Option(help="Size that all graphs may have, in MB.")] = None
    max_norm: Annotated[float, clear_setting("max_norm", "the longest update, as an L2 norm.")]
    max_weight: Annotated[float, clear_setting("max_weight", "the greatest weight of a report.")]
    estimator: Annotated[
        str, clear_setting("estimator", "mean, trimmed-mean, median or krum; all but the first keep every report.")
    ]
    tolerate: Annotated[int, clear_setting("tolerate", "false reports that a trimmed mean or krum expects.")]
    secagg: Annotated[
        bool, typer.Option("--secagg", help="Sum reports under secure aggregation: the coordinator sees no single one.")
    ] = False
    clip_norm: Annotated[float, secagg_setting("clip_norm", "the longest update, as an L2 norm.")]
    bits: Annotated[int, secagg_setting("bits", "precision of each value, 2 to 20.")]
    max_examples: Annotated[int, secagg_setting("max_examples", "the greatest weight of a device.")]
    phase_s: Annotated[float, secagg_setting("phase_s", "how long a phase waits for devices.")]
    group_size: Annotated[int, secagg_setting("group_size", "a larger cohort is divided into groups.")]

    def settings(self) -> TaskSettings:
        """The settings. Raises typer.BadParameter for a rule that is none, and InvalidTask for any other setting."""
        from coordinator.rules.clear_reports import ClearReports
        from coordinator.rules.eligibility import OnDevice, Requires
        from coordinator.rules.task_settings import FootprintBudget, TaskSettings
        from muster.options.device_rules import parse_rules

        return TaskSettings(
            population=self.population,
            goal=self.goal,
            rounds=self.rounds,
            minimum=self.minimum,
            over_selection=self.over_selection,
            selection_timeout_s=self.selection_timeout_s,
            reporting_deadline_s=self.reporting_deadline_s,
            max_attempts=self.max_attempts,
            max_loss_growth=self.max_loss_growth,
            min_examples=self.min_examples,
            min_separation_s=self.min_separation_s,
            min_separation_rounds=self.min_separation_rounds,
            requires=parse_rules(self.require, Requires, "--require"),
            schedule=parse_schedule(self.schedule),
            privacy=parse_privacy(self.privacy),
            same_cohort=self.same_cohort,
            on_device=parse_rules(self.on_device, OnDevice, "--on-device"),
            seed=self.seed,
            formats=tuple(self.formats),
            budget=FootprintBudget(
                peak_rss_mb=self.max_rss_mb,
                step_cpu_ms=self.max_step_ms,
                graph_bytes=None if self.max_graph_mb is None else self.max_graph_mb * 1e6,
            ),
            secagg=self._masking() if self.secagg else None,
            buffered=self._buffered() if self.mode is Mode.BUFFERED else None,
            clear=ClearReports(
                max_norm=self.max_norm,
                max_weight=self.max_weight,
                estimator=self.estimator,
                tolerate=self.tolerate,
            ),
        )

    def _buffered(self) -> Buffered:
        from coordinator.rules.task_settings import Buffered

        return Buffered(concurrency=self.concurrency, max_staleness=self.max_staleness)

    def _masking(self) -> Secagg:
        from coordinator.rules.task_settings import Secagg

        return Secagg(
            clip_norm=self.clip_norm,
            bits=self.bits,
            max_examples=self.max_examples,
            phase_s=self.phase_s,
            group_size=self.group_size,
        )
