"""Tables of rounds for a terminal: how they went, what an evaluation found, and what went wrong."""

from __future__ import annotations

from coordinator.rules.buffers import mean_staleness
from coordinator.rules.entities import RoundRecord
from coordinator.rules.kinds import Figures, figures_of, means_of
from fedcore.algorithms.evaluation import PERCENTILES
from muster.output import say, show_table


def show_rounds(rounds: list[RoundRecord], algorithm: str) -> None:
    """Tables that each fit a terminal: how rounds went, what an evaluation found last, and what went wrong."""
    found = [means_of(algorithm, record.metrics) for record in rounds]
    names = list(dict.fromkeys(name for means in found for name in means))
    columns = ("round", "attempt", "state", "reported", "seconds", *(name.replace(".", " ") for name in names))
    cells = [
        (r.number, r.attempt, r.state, _reported(r), r.seconds, *map(means.get, names))
        for r, means in zip(rounds, found, strict=True)
    ]
    show_table(columns, cells)
    figures = [one for record in rounds if (one := figures_of(algorithm, record.metrics))]
    if figures:
        say()
        _show_figures(figures[-1])
    ends = {
        "round": "number",
        "attempt": "attempt",
        "aborted": "aborted",
        "lost": "lost",
        "not needed": "not_needed",
        "expired": "expired",
        **({"too stale": "stale"} if any(r.stale for r in rounds) else {}),
        "reason": "reason",
        "abort reasons": "abort_reasons",
    }
    missing = [
        [getattr(r, name) for name in ends.values()]
        for r in rounds
        if r.taken_over + r.assigned > r.reported + r.handed_on or r.reason or r.abort_reasons
    ]
    if missing:
        say()
        show_table(tuple(ends), missing)


def _show_figures(figures: Figures) -> None:
    say(figures.sentence)
    measured = [
        (row.metric, over, one.mean, one.words or None, *percentiles, row.improved)
        for row in figures.rows
        for over, one, percentiles in (
            ("examples", row.over_examples, [None] * len(row.percentiles)),
            ("devices", row.over_devices, row.percentiles),
        )
        if one is not None
    ]
    places = [f"p{percent}" for percent in PERCENTILES] if figures.rows[0].percentiles else []
    show_table(("metric", "mean over", "mean", "interval", *places, "better on a share of"), measured)


def _reported(record: RoundRecord) -> str:
    """The reports of a round: of how many devices or, in mode buffered, how many versions old on average."""
    if not record.staleness:
        return f"{record.reported} of {record.assigned}"
    return f"{record.reported}, {mean_staleness(record.staleness):.1f} versions old"
