"""The option `--schedule` of commands that train: a server schedule in parts, KEY=VALUE."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from fedcore.decoding import converter
from fedcore.names import offered
from fedcore.schedule import ServerSchedule
from muster.output import parse_settings

Schedule = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="KEY=VALUE",
        help="How rounds change: warmup_rounds, scaling (sqrt or linear) with reference_cohort, double_every with "
        "largest_cohort; may be repeated.",
    ),
]
_convert = converter(ServerSchedule, strict=False)


def parse_schedule(pairs: list[str] | None) -> ServerSchedule:
    """The schedule of these parts. Raises typer.BadParameter, or ScheduleError, naming the part that is wrong."""
    values = parse_settings(pairs)
    fields = ServerSchedule.__struct_fields__
    for name in values:
        if name not in fields:
            raise typer.BadParameter(f"there is no {name!r}; {offered(name, fields)}", param_hint="--schedule")
    try:
        return _convert(values)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint="--schedule") from error
