"""The option `--schedule` of commands that train: a server schedule in parts, KEY=VALUE."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcore.decoding import converter
from fedcore.schedule import ServerSchedule
from muster.options.key_values import parse_key_values

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
    return parse_key_values("--schedule", pairs, ServerSchedule.__struct_fields__, _convert)
