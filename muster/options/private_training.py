"""The option `--privacy` of `muster simulate`: how a simulation is private, in parts, KEY=VALUE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from muster.options.key_values import parse_key_values

if TYPE_CHECKING:
    from simulator.private_training import PrivateTraining

PrivateParts = Annotated[
    list[str] | None,
    typer.Option(
        "--privacy",
        metavar="KEY=VALUE",
        help="Noise on every sum, of clipped reports (clip_norm): delta with epsilon, from which the noise follows, or "
        "with noise_multiplier; mechanism (gaussian, tree, banded with bands, or with --secagg distributed), "
        "min_separation_rounds, poisson; may be repeated.",
    ),
]


def parse_private_training(pairs: list[str]) -> PrivateTraining:
    """The privacy of these parts. Raises typer.BadParameter, or EngineError, naming the part that is wrong."""
    from simulator.private_training import PrivateTraining, from_words  # it loads torch, which `--help` must not

    return parse_key_values("--privacy", pairs, PrivateTraining.__struct_fields__, from_words)
