"""Fitting: an algorithm that knows what it has to of a model, its metrics and its local parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.algorithms.clipped import Clipped
from fedcore.algorithms.evaluation import Measuring, suited_metrics
from fedcore.algorithms.partly_local import AUTO, PartlyLocal, text_of_ranges
from fedcore.errors import InvalidSetting
from fedcore.params import ParamSchema


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
