"""The option `--privacy` of `muster task create`: the promise of a task in parts, KEY=VALUE."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from fedcore.decoding import converter
from fedcore.errors import PrivacyError
from fedcore.privacy.settings import LedgerEntry, Noise, Privacy
from muster.parts import parse_parts

PrivacyParts = Annotated[
    list[str] | None,
    typer.Option(
        "--privacy",
        metavar="KEY=VALUE",
        help="Noise on every sum, and a budget that ends the task: epsilon, delta, users (of the population), "
        "mechanism (gaussian, tree, banded with bands), noise_multiplier; may be repeated.",
    ),
]
_convert = converter(Privacy, strict=False)
_OWN = ("min_separation_rounds", "sampling_probability")
"""Parts of a promise that are no parts of the option: other options say them, or no task can have them."""


def parse_privacy(pairs: list[str] | None, rounds: int, min_separation_rounds: int, bits: int) -> Privacy | None:
    """The promise of these parts; None without any.

    Without noise_multiplier it is the least with which the budget lasts for all rounds; `bits` are those of masked
    values, to whose steps devices add noise. Raises typer.BadParameter naming the part that is wrong or missing, and
    PrivacyError without an accountant.
    """
    if not pairs:
        return None
    from fedcore.masking import least_square
    from fedcore.privacy.accounting import calibrated

    fields = [name for name in Privacy.__struct_fields__ if name not in _OWN]
    given = {"min_separation_rounds": min_separation_rounds}
    solve = not any(pair.startswith("noise_multiplier=") for pair in pairs)
    try:
        found: Privacy = parse_parts(
            "--privacy", pairs, fields, lambda values: _convert({"noise_multiplier": 1} | values | given)
        )
    except PrivacyError as error:
        raise typer.BadParameter(str(error), param_hint="--privacy") from error
    if not solve:
        return found
    noise = Noise(**{name: getattr(found, name) for name in Noise.__struct_fields__})
    if found.noise_of_devices:
        square = least_square(bits)
        noise = LedgerEntry(**msgspec.structs.asdict(noise), round=0, clip=1.0, devices=0, square=square)
    return msgspec.structs.replace(found, noise_multiplier=calibrated(noise, rounds, found.epsilon, found.delta))
