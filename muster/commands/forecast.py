"""`muster forecast`: how long a task will take on a population, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from coordinator.errors import InvalidTask
from fedcore.validation import build
from muster.options.settings import with_settings
from muster.options.simulate import configuration, values_of
from muster.output import Json, emit, progress, remark, show_fields, show_table
from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig

if TYPE_CHECKING:
    from simulator.configuration import SimulationConfig
    from simulator.forecast.course import CommittedRound
    from simulator.forecast.forecast import Forecast

PLAN = "A bundle whose certificate gives --example-s, --bytes-down and --bytes-up, unless given."
TRAIN = "Train the cohorts that were drawn: a file of options of `muster simulate`. Accuracy then has its hours."
BESIDE = "Another task of the same population: a file of its options; may be repeated. A row for each task."
VARY = "Compare values of one setting, such as goal=50,100,200: a row for each."
PLOT = "Draw the rounds that are done over virtual time, with --train the accuracy: .svg or .png."
_NOT_SHOWN = ("beside", "check_ins_by_hour", "rounds_by_hour")


@with_settings(ForecastConfig)
def forecast(
    *,
    settings: dict[str, Any],
    plan: Annotated[Path | None, typer.Option(help=PLAN)] = None,
    train: Annotated[Path | None, typer.Option(metavar="CONFIG.toml", help=TRAIN)] = None,
    beside: Annotated[list[Path] | None, typer.Option(metavar="TASK.toml", help=BESIDE)] = None,
    vary: Annotated[str | None, typer.Option(metavar="SETTING=VALUE,…", help=VARY)] = None,
    plot: Annotated[Path | None, typer.Option(help=PLOT)] = None,
    json: Json = False,
) -> None:
    """Tell how a task would go, before a phone sees it.

    The coordinator's own rules run in virtual time on modelled devices: each is charged and idle for a stretch of most
    nights, has its own speed, bandwidth and number of examples, and vanishes now and then. A profile that can fill no
    round is refused at once, with the setting that starves it. For example, a day of a million devices, then which goal
    gets there first:

    \b
      muster forecast --devices 1000000 --goal 500
      muster forecast --devices 100000 --vary goal=50,100,200 --plot rounds.svg
      muster forecast --devices 10000 --goal 50 --train simulation.toml
    """
    if plan is not None:
        settings = {**_costs(plan), **settings}
    configs = _varied(settings, vary)
    training = None if train is None else configuration([train], {})
    tasks = {path.stem: values_of(path) for path in beside or ()}
    found = {name: _forecast(name, config, training, tasks) for name, config in configs.items()}
    if tasks:
        names = [f"{name}, {task}" for name in found for task in ("this task", *tasks)]
        found = dict(zip(names, (one for first in found.values() for one in (first, *first.beside)), strict=True))
    if plot is not None:
        from muster.pictures.curves import draw_forecasts

        draw_forecasts(found).save(plot)
        remark(f"picture: {plot}")
    first = next(iter(found.values()))
    if json:
        return emit(first if vary is None else found)
    if len(found) > 1 or vary is not None:
        return _compare(found)
    return _show(first, next(iter(configs.values())))


def _costs(plan: Path) -> dict[str, str]:
    from fedcore.bundle import Bundle
    from simulator.forecast.forecast import costs_of

    return {name: str(value) for name, value in costs_of(Bundle(plan)).items()}


def _varied(settings: dict[str, Any], vary: str | None) -> Mapping[str, ForecastConfig]:
    """The configurations by the name that they have in tables; all are checked before one runs."""
    if vary is None:
        config = build(ForecastConfig, settings, text=True)
        return {f"{config.devices:,} devices": config}
    name, equals, values = vary.partition("=")
    if not equals:
        raise typer.BadParameter(f"{vary!r} is not of the form goal=50,100,200", param_hint="--vary")
    name = name.replace("-", "_")
    return {
        f"{name}={value}": build(ForecastConfig, {**settings, name: value}, text=True) for value in values.split(",")
    }


def _forecast(
    name: str, config: ForecastConfig, training: SimulationConfig | None, tasks: Mapping[str, Mapping[str, Any]]
) -> Forecast:
    """The forecast, behind a progress bar of virtual hours, and one of rounds where it trains."""
    from simulator.forecast.forecast import forecast as run

    with progress() as bar:
        shown = bar.add_task(name, total=24 * config.days, note="virtual hours")

        def train(rounds: Sequence[CommittedRound]) -> list[tuple[float, float]]:
            if training is None:
                return []
            from simulator.forecast.training import accuracy_over_time

            trained = bar.add_task(name, total=min(training.rounds, len(rounds)), note="rounds of training")
            return accuracy_over_time(training, rounds, lambda number, _: bar.update(trained, completed=number))

        others = [_beside(task, config, given) for task, given in tasks.items()]
        return run(config, lambda hour: bar.update(shown, completed=hour), train, others)


def _beside(task: str, config: ForecastConfig, given: Mapping[str, Any]) -> ForecastConfig:
    try:
        return config.beside(given)
    except (ForecastError, InvalidTask) as error:
        raise typer.BadParameter(f"{task}: {error}", param_hint="--beside") from error


def _show(found: Forecast, config: ForecastConfig) -> None:
    facts = {name: value for name, value in msgspec.to_builtins(found).items() if name not in _NOT_SHOWN}
    for absent in [name for name in ("paused", "accuracy") if not facts[name]]:
        del facts[absent]
    show_fields(facts)
    if found.done_at_h is None:
        remark(f"{config.rounds} rounds take longer: {found.rounds} were done in {config.days} days; raise --days")


def _compare(found: Mapping[str, Forecast]) -> None:
    rows = [
        (
            name,
            one.rounds,
            one.done_at_h,
            one.round_s and one.round_s.p50,
            one.check_ins,
            one.reports,
            one.wasted,
            one.never_took_part,
            one.phone.cpu_s,
            one.accuracy[-1][1] if one.accuracy else None,
        )
        for name, one in found.items()
    ]
    figures = ("rounds", "done at h", "round s", "check-ins", "reports", "wasted", "never", "phone cpu s", "accuracy")
    show_table(("", *figures), rows)
