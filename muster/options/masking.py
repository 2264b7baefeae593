"""The option `--secagg` of `muster simulate`: how reports are masked, in parts, KEY=VALUE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from muster.options.key_values import parse_key_values

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
    from simulator.masked_sums import from_words  # it loads torch, which `--help` must not

    return parse_key_values("--secagg", pairs, _PARTS, from_words)
