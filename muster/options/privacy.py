"""The option `--privacy` of `muster task create`: the privacy budget of a task in parts, KEY=VALUE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from muster.options.key_values import parse_key_values

if TYPE_CHECKING:
    from coordinator.rules.task_settings import PrivacyBudget

PrivacyParts = Annotated[
    list[str] | None,
    typer.Option(
        "--privacy",
        metavar="KEY=VALUE",
        help="Noise, and a budget that ends the task: epsilon, delta, users (of the population), mechanism (gaussian, "
        "tree, banded with bands, distributed), noise_multiplier (default: the least that lasts); repeatable.",
    ),
]


def parse_privacy(pairs: list[str] | None) -> PrivacyBudget | None:
    """The budget of these parts; None without any. Raises typer.BadParameter naming the part that is wrong."""
    from coordinator.rules.task_settings import PrivacyBudget, to_privacy_budget  # to list commands loads no settings

    if not pairs:
        return None
    fields = list(PrivacyBudget.__dataclass_fields__)
    return parse_key_values("--privacy", pairs, fields, to_privacy_budget)
