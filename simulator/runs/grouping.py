"""Runs grouped by what differs among them: those that differ only in the seed are one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from simulator.configuration import SimulationConfig
from simulator.runs.config_file import WHO_TRAINS, flat_of


class Configured(Protocol):
    """A run, kept in a folder or in memory."""

    @property
    def config(self) -> SimulationConfig:
        """What it was made of."""


R = TypeVar("R", bound=Configured)

_OWN = "settings."
"""The beginning of the names of an algorithm's own settings."""


def grouped(runs: Sequence[R], places: Sequence[str]) -> dict[str, list[R]]:
    """Runs by a label that names the settings in which they differ, as `algorithm=fedavg, client_lr=0.1`.

    Where none differ, it names model and algorithm. Runs with the same settings and the same seed, as of a fleet and of
    its simulation, are a group each, whose label ends with the run's place.
    """
    settings = [_settings(run) for run in runs]
    named = [key for key in dict.fromkeys(key for one in settings for key in one) if _differ(key, settings)]
    ends = Counter(key.rpartition(".")[2] for key in named)
    short = {key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in named}
    groups: dict[str, list[tuple[R, str]]] = {}
    for run, place, one in zip(runs, places, settings, strict=True):
        words = [f"{short[key]}={_words(one.get(key))}" for key in named if _belongs(key, one, settings)]
        label = ", ".join(words) or f"{run.config.model}, {run.config.baseline or run.config.algorithm}"
        groups.setdefault(label, []).append((run, place))
    return {name: part for label, group in groups.items() for name, part in _told_apart(label, group).items()}


def _settings(run: Configured) -> dict[str, Any]:
    return {key: value for key, value in flat_of(run.config).items() if key not in {*WHO_TRAINS, "seed"}}


def _differ(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a setting differs among runs; one of an algorithm, among runs of that algorithm, whose name says more."""
    pairs = {(_method(one) if key.startswith(_OWN) else None, _words(one.get(key))) for one in settings}
    return len(pairs) > len({method for method, _ in pairs})


def _belongs(key: str, one: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run could have a setting: one of an algorithm is only for runs of that algorithm."""
    return not key.startswith(_OWN) or any(key in other and _method(one) == _method(other) for other in settings)


def _method(one: Mapping[str, Any]) -> tuple[Any, Any]:
    return one.get("algorithm"), one.get("baseline")


def _told_apart(label: str, group: list[tuple[R, str]]) -> dict[str, list[R]]:
    if len({run.config.seed for run, _ in group}) == len(group):
        return {label: [run for run, _ in group]}
    return {f"{label}, {place}": [run] for run, place in group}


def _words(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
