"""`muster forecast`: how long a task will take on a population, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fedcore.validation import build
from muster.options.settings import with_settings
from muster.output import Json, emit, progress, remark, show_fields
from simulator.forecast.configuration import ForecastConfig

if TYPE_CHECKING:
    from simulator.forecast.forecast import Forecast


@with_settings(ForecastConfig)
def forecast(*, settings: dict[str, Any], json: Json = False) -> None:
    """Tell how a task would go on a population of phones, before a phone sees it.

    The coordinator's own rules run in virtual time on modelled devices: each is charged and idle for a stretch of most
    nights, has its own speed, bandwidth and number of examples, and vanishes now and then. Nothing is trained. A
    profile that can fill no round is refused at once, with the setting that starves it. For example, a day of a million
    devices, then the same policy with more patience:

    \b
      muster forecast --devices 1000000 --goal 500
      muster forecast --devices 1000000 --goal 500 --reporting-deadline-s 1800
    """
    config = build(ForecastConfig, settings, text=True)
    found = _forecast(config)
    if json:
        return emit(found)
    return _show(found, config)


def _forecast(config: ForecastConfig) -> Forecast:
    """The forecast, behind a progress bar of virtual hours."""
    from simulator.forecast.forecast import forecast as run

    with progress() as bar:
        task = bar.add_task(f"{config.devices:,} devices", total=24 * config.days, note="virtual hours")
        return run(config, lambda hour: bar.update(task, completed=hour))


def _show(found: Forecast, config: ForecastConfig) -> None:
    facts = msgspec.to_builtins(found)
    del facts["check_ins_by_hour"]
    if not facts["paused"]:
        del facts["paused"]
    show_fields(facts)
    if found.done_at_h is None:
        remark(f"{config.rounds} rounds take longer: {found.rounds} were done in {config.days} days; raise --days")
