"""Forecasts from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedcore.bundle import Bundle
from fedcore.validation import build
from muster.python.arguments import of_kind, speaking_python, with_settings_of
from muster.python.progress import progress_line
from simulator.configuration import to_config
from simulator.forecast import forecast as twin
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import CommittedRound
from simulator.forecast.plan_costs import costs_of


@speaking_python
@with_settings_of(ForecastConfig)
def forecast(
    *,
    plan: Bundle | None = None,
    train: Mapping[str, Any] | None = None,
    beside: Sequence[Mapping[str, Any]] = (),
    on_hour: Callable[[int], None] = lambda hour: None,
    **settings: Any,
) -> twin.Forecast:
    """Tell how a task would go on a modelled population: the coordinator's rules in virtual time, without training.

    plan: a bundle whose certificate gives `example_s`, `bytes_down` and `bytes_up`, unless given. train: options of
    `simulate` by name, with `model`, to train the cohorts that were drawn: `accuracy` then has its hours. beside:
    further tasks of the same population, each by its own settings. on_hour: called with the virtual hours that are
    over. Raises ForecastError or InvalidTask, naming what is wrong, also for a population that can fill no round. The
    other keywords are the settings of a forecast:
    """
    of_kind("plan", plan, (Bundle, type(None)), "a Bundle, as `muster.export` gives it")
    of_kind("train", train, (Mapping, type(None)), 'a mapping such as {"model": "mlp", "rounds": 50}')
    of_kind("on_hour", on_hour, (Callable,), "a function of the virtual hours that are over")
    of_kind("beside", beside, (Sequence,), 'a list of settings such as [{"goal": 50}]')
    config = build(ForecastConfig, {**({} if plan is None else costs_of(plan)), **settings})
    others = [config.beside(one) for one in beside]
    with progress_line() as tell:

        def heard(hour: int) -> None:
            tell(f"{config.devices:,} devices: {hour} of {24 * config.days} virtual hours")
            on_hour(hour)

        return twin.forecast(config, heard, _trainer(train, tell), others)


def _trainer(
    options: Mapping[str, Any] | None, tell: Callable[[str], None]
) -> Callable[[Sequence[CommittedRound]], list[tuple[float, float]]]:
    if options is None:
        return lambda rounds: []
    from simulator.forecast.training import accuracy_over_time  # loads torch

    config = to_config(options)
    return lambda rounds: accuracy_over_time(config, rounds, lambda number, _: tell(f"training: round {number}"))
