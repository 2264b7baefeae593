"""An algorithm and its model: what fitting tells an algorithm of a model, and facts derived from both.

Legend: d parameters of the model.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcore.algorithms.algorithm import Algorithm, ClientState, State, Vector, keeps_client_state, trips_of
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.evaluation import Measuring, suited_metrics
from fedcore.algorithms.local_training import AUTO, OWN, PartlyLocal, text_of_ranges
from fedcore.algorithms.rehearsal import for_any_model, rehearse
from fedcore.errors import InvalidSetting
from fedcore.params import ParamSchema

# Fitting: an algorithm that knows what it has to of a model, its metrics and its local parameters.


def for_model(algorithm: Algorithm, metrics: Sequence[str], schema: ParamSchema) -> Algorithm:
    """The algorithm with a range for every metric of a model, in the model's order, and the places of its local
    parameters; most algorithms as they are.

    metrics: the model's, without its examples. Raises InvalidSetting, naming a metric that has no range or that the
    model does not have; for local parameters that the algorithm would share, and where it needs some and has none.
    """
    if isinstance(algorithm, Clipped):
        return replace(algorithm, inner=for_model(algorithm.inner, metrics, schema))
    if isinstance(algorithm, Measuring):
        algorithm = replace(algorithm, metrics=suited_metrics(algorithm, metrics))
    for stage in (stage for trip in trips_of(algorithm) for stage in trip.passes if stage.forward):
        if stage.measures != tuple(metrics):
            have = ", ".join(metrics)
            raise InvalidSetting(
                f"{algorithm.name}: pass {stage.name} measures {', '.join(stage.measures)}; the model has {have}"
            )
    return with_local(algorithm, schema)


def with_local(algorithm: Algorithm, schema: ParamSchema) -> Algorithm:
    """The algorithm with the places of a model's local parameters; most algorithms as they are.

    Raises InvalidSetting for local parameters that it would share, and where it needs some and has none, or others.
    """
    if isinstance(algorithm, PartlyLocal):
        return replace(algorithm, local=_local(algorithm, schema))
    if schema.local:
        raise InvalidSetting(
            f"{algorithm.name} shares all parameters, and of this model {', '.join(schema.local)} stay on clients: "
            "take fedper or fedrep, or leave local out"
        )
    return algorithm


def _local(algorithm: PartlyLocal, schema: ParamSchema) -> str:
    """The places of a model's local parameters, as a setting."""
    names = [tensor.name for tensor in schema.tensors]
    if not schema.local:
        raise InvalidSetting(
            f"{algorithm.name} keeps parameters on clients, and this model names none: choose some of "
            f"{', '.join(names)} by local, such as --local='{names[-1]}'"
        )
    ranges = text_of_ranges(schema.local_ranges)
    if algorithm.local not in {AUTO, ranges}:
        raise InvalidSetting(f"{algorithm.name}: local is {algorithm.local}, and the model's is {ranges}; leave it out")
    return ranges


# Facts about an algorithm, all derived: sizes from a rehearsal, settings from its fields, words from its docstrings.


_TRIED = (5, 7)
"""Two sizes of a model, from which follows how every size depends on that of the model."""
_CITATION = re.compile(r'^([^\s,]+)[^"]*"[^"]+",? ?(.*?\b(?:19|20)\d\d\b(?!\.\d))(?:, (.*?))?(?:[.;] |[.;]?$)')
_MEANING = re.compile(r"^(\w+(?:, \w+)*): (.*(?:\n(?!\w+(?:, \w+)*: |\n).*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Size:
    """How many values: `per_parameter` · d + `constant`."""

    per_parameter: int = 0
    constant: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.per_parameter + other.per_parameter, self.constant + other.constant)

    def __str__(self) -> str:
        vectors = {0: "", 1: "d"}.get(self.per_parameter, f"{self.per_parameter}d")
        return " + ".join(filter(None, [vectors, str(self.constant) if self.constant else ""])) or "0"


@dataclass(frozen=True, slots=True)
class SettingFacts:
    """A setting: its value, what it may be, and what it means."""

    name: str
    value: float | int | str
    values: str
    meaning: str


@dataclass(frozen=True, slots=True)
class PassFacts:
    """A pass over the local examples, and its loop."""

    name: str
    epochs: int
    batch_size: int
    steps: int | None


@dataclass(frozen=True, slots=True)
class TripFacts:
    """A trip: the vectors that go down, the passes that a device runs, the vectors that come up."""

    down: dict[str, Size]
    passes: tuple[PassFacts, ...]
    up: dict[str, Size]


@dataclass(frozen=True, slots=True)
class AlgorithmFacts:
    """What there is to know about an algorithm with its settings as they are.

    summary, equations: its module's docstring, first line and rest. paper: the first author, the place and year, and
    the part of the paper; empty where the docstring cites none. state: the vectors that the server keeps between
    rounds; kept: those that each device does, where a model may name local parameters as if it named all.
    """

    name: str
    family: str
    summary: str
    equations: str
    paper: str
    weighting: str
    trips: tuple[TripFacts, ...]
    state: dict[str, Size]
    kept: dict[str, Size]
    settings: tuple[SettingFacts, ...]

    @property
    def down(self) -> tuple[Size, ...]:
        """What a device receives in each trip."""
        return tuple(total(trip.down) for trip in self.trips)

    @property
    def up(self) -> tuple[Size, ...]:
        """What a device sends in each trip, its weight and metrics apart."""
        return tuple(total(trip.up) for trip in self.trips)


def facts_of(algorithm: Algorithm) -> AlgorithmFacts:
    """The facts about an algorithm. Raises what the algorithm raises when it is rehearsed."""
    rehearsals = [rehearse(for_any_model(algorithm), np.linspace(-1, 1, size)) for size in _TRIED]
    trips = tuple(
        TripFacts(
            _sizes([one[index].broadcast for one in rehearsals]),
            tuple(
                PassFacts(stage.name, stage.loop.epochs, stage.loop.batch_size, stage.loop.steps)
                for stage in trip.passes
            ),
            _sizes([one[index].report for one in rehearsals]),
        )
        for index, trip in enumerate(trips_of(algorithm))
    )
    parts = (algorithm.inner, algorithm.clipping) if isinstance(algorithm, Clipped) else (algorithm,)
    summary, _, equations = (inspect.getdoc(inspect.getmodule(type(parts[0]))) or "").partition("\n\n")
    return AlgorithmFacts(
        name=algorithm.name,
        family=algorithm.family,
        summary=" ".join(summary.split()),
        equations=equations,
        paper=_paper(equations),
        weighting=algorithm.weighting,
        trips=trips,
        state=_sizes([one[-1].after for one in rehearsals]),
        kept=_sizes([_kept(algorithm, one[0].before) for one in rehearsals]),
        settings=tuple(setting for part in parts for setting in _settings(part)),
    )


def _kept(algorithm: Algorithm, state: State) -> ClientState:
    if isinstance(algorithm, PartlyLocal):
        return {OWN: state["params"]}
    return algorithm.init_client(state["params"]) if keeps_client_state(algorithm) else {}


def total(sizes: Mapping[str, Size]) -> Size:
    """The size of all vectors together."""
    return sum(sizes.values(), Size())


def _sizes(found: Iterable[Mapping[str, Vector]]) -> dict[str, Size]:
    """How the sizes of vectors depend on that of the model, from the vectors of two models."""
    small, large = found
    gap = _TRIED[1] - _TRIED[0]
    slopes = {name: (large[name].size - vector.size) // gap for name, vector in small.items()}
    return {name: Size(slopes[name], vector.size - slopes[name] * _TRIED[0]) for name, vector in small.items()}


def _settings(algorithm: Any) -> tuple[SettingFacts, ...]:
    meanings = _meanings(type(algorithm))
    return tuple(
        SettingFacts(field.name, getattr(algorithm, field.name), field.metadata["setting"][2], meanings[field.name])
        for field in dataclasses.fields(algorithm)
    )


def _meanings(algorithm: type) -> dict[str, str]:
    """What docstrings say of settings, in lines `name: meaning` or `name, name: meaning`; a class wins over its bases.

    A setting that no docstring names means nothing: an empty text.
    """
    meanings = {field.name: "" for field in dataclasses.fields(algorithm)}
    for cls in reversed(algorithm.__mro__):
        for names, words in _MEANING.findall(inspect.cleandoc(cls.__doc__ or "")):
            said = " ".join(words.split())
            meanings |= {name: said for name in names.split(", ") if name in meanings}
    return meanings


def _paper(words: str) -> str:
    """The first citation that a paragraph opens with: authors, "title", place year, part."""
    for paragraph in words.split("\n\n"):
        cited = _CITATION.match(" ".join(paragraph.split()))
        if cited:
            return ", ".join(filter(None, cited.groups()))
    return ""
