"""The option `--secagg` of `muster simulate`: how reports are masked, in parts, KEY=VALUE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from fedcore.names import offered
from muster.output import parse_settings

if TYPE_CHECKING:
    from coordinator.rules.task_settings import Secagg

MaskedParts = Annotated[
    list[str] | None,
    typer.Option(
        "--secagg",
        metavar="KEY=VALUE",
        help="Round reports as under secure aggregation: clip_norm, bits, max_examples, group_size, as of a task; may "
        "be repeated.",
    ),
]
_PARTS = ("clip_norm", "bits", "max_examples", "group_size")


def parse_masking(pairs: list[str]) -> Secagg:
    """How reports are masked by these parts. Raises typer.BadParameter, or InvalidTask, naming what is wrong."""
    from simulator.masked_sums import from_words  # noqa: PLC0415  # it loads torch, which `--help` must not

    values = parse_settings(pairs)
    for name in values:
        if name not in _PARTS:
            raise typer.BadParameter(f"there is no {name!r}; {offered(name, _PARTS)}", param_hint="--secagg")
    try:
        return from_words(values)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint="--secagg") from error
