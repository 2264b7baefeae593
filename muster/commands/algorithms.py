"""`muster algorithms`: the algorithms that there are, and all about one of them, derived from its code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from muster.options.key_values import parse_key_values
from muster.output import Json, Settings, emit, say, show_fields, show_table

if TYPE_CHECKING:
    from fedcore.algorithms.facts import AlgorithmFacts, Size, TripFacts

algorithms_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at the federated algorithms.")


@algorithms_app.command("list")
def list_algorithms(json: Json = False) -> None:
    """List every built-in algorithm, with its sizes.

    Also its family, and whether it runs on devices. Sizes are numbers of values, for a model of d parameters, with the
    default settings. A second trip follows a comma.
    """
    from fedcore.algorithms import ALGORITHMS, create
    from fedcore.algorithms.facts import facts_of

    algorithms = [facts_of(create(name)) for name in ALGORITHMS]
    if json:
        return emit(algorithms)
    columns = ("algorithm", "family", "down", "up", "server state", "trips", "cross-device", "paper")
    return show_table(columns, [_cells(facts) for facts in algorithms])


@algorithms_app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="An algorithm of the list, or your own as package.module:Class or file.py:Class.")
    ],
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Show an algorithm: its equations and settings.

    Also what device and server do. Sizes are numbers of values, for a model of d parameters. They are those of the
    settings given with --set.
    """
    from fedcore.algorithms import create, module_of
    from fedcore.algorithms.check import check
    from fedcore.algorithms.facts import facts_of

    algorithm = create(name, parse_key_values(settings), [module_of(name)])
    check(algorithm)
    facts = facts_of(algorithm)
    if json:
        return emit(facts)
    for line in (facts.summary, "", *facts.equations.splitlines(), ""):
        say(line)
    show_fields(_outline(facts))
    say()
    columns = ("setting", "value", "what it may be", "meaning")
    return show_table(
        columns, [(setting.name, setting.value, setting.values, setting.meaning) for setting in facts.settings]
    )


def _cells(facts: AlgorithmFacts) -> tuple[object, ...]:
    from fedcore.algorithms.facts import total

    sizes = (", ".join(map(str, facts.down)), ", ".join(map(str, facts.up)), total(facts.state), total(facts.kept))
    return (facts.name, facts.family, *sizes, len(facts.trips), facts.paper)


def _outline(facts: AlgorithmFacts) -> dict[str, object]:
    """What device and server do, in a line each."""
    lines: dict[str, object] = {"family": facts.family}
    for number, trip in enumerate(facts.trips, 1):
        of_trip = f" in trip {number}" if len(facts.trips) > 1 else ""
        lines[f"device receives{of_trip}"] = _vectors(trip.down)
        lines[f"device runs{of_trip}"] = _runs(trip)
        lines[f"device reports{of_trip}"] = _vectors(trip.up)
    means = "weighed by examples" if facts.weighting == "examples" else "each device alike"
    lines["server takes"] = f"the mean over the cohort, {means}"
    lines["server keeps"] = _vectors(facts.state)
    return lines | {"device keeps": _vectors(facts.kept) or "nothing"}


def _vectors(sizes: dict[str, Size]) -> str:
    return ", ".join(f"{name} ({size})" for name, size in sizes.items())


def _runs(trip: TripFacts) -> str:
    passes = [
        f"{sweep.name} ({sweep.epochs} × all examples in batches of {sweep.batch_size}"
        f"{f', at most {sweep.steps} steps' if sweep.steps else ''})"
        for sweep in trip.passes
    ]
    return ", then ".join(passes)
