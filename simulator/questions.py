"""A question to the clients of a simulation, whose texts are a model's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from msgspec import UNSET

from device_runtime.errors import DeviceError
from device_runtime.examples.source import padded, unpadded
from device_runtime.texts import TextColumn
from export.model import Model, ModelSpec
from export.questions.asked import AnyQuestion
from fedcore.algorithms import name_of, settings_of
from fedcore.bundle import AlgorithmRef
from fedcore.errors import QuestionError
from fedcore.plan import BlobRef, Field
from fedcore.questions.answer import Answer, answer_of
from simulator.configuration import PrivateTraining
from simulator.engine import Engine
from simulator.errors import DatasetError, Diverged
from simulator.population import Array, Population, longest
from simulator.private_training import Cohorts, PrivateSums, SimulatedPrivacy, promise_of


def with_tokens(users: Population, spec: ModelSpec) -> Population:
    """The same users with tokens in place of their texts, as devices make them; users without texts as they are.

    A field of bytes that has no tokenizer becomes uint8 (N, bytes), UTF-8 and zeros. Raises DatasetError for a text
    that is no UTF-8 or too long, and where the tokenizer does not fit the model.
    """
    fields, blobs = dict(users.fields), {BlobRef.of(data).sha256: data for data in spec.tokenizers}
    for field in spec.fields:
        texts = fields.get(field.name, np.zeros(0))
        if field.tokenizer is UNSET:
            if texts.dtype == object and field.dtype == "uint8" and len(field.shape) == 1:
                fields[field.name] = _padded(texts, field)
        elif texts.dtype in (object, np.uint8):
            blob = blobs[field.tokenizer.blob.sha256]
            column = TextColumn(field, blob, field.tokenizer.padding, unpadded(texts))
            try:
                fields[field.name] = column.tokens(lambda: True).ids
            except DeviceError as error:
                raise DatasetError(str(error)) from error
    return replace(users, fields=fields)


def as_devices_hold(shard: Mapping[str, Array]) -> dict[str, Array]:
    """A client's examples as arrays that a device reads: its texts with zeros at their ends, as long as its longest."""
    return {name: padded(array, longest(array)) if array.dtype == object else array for name, array in shard.items()}


def _padded(texts: Array, field: Field) -> Array:
    if longest(texts) > field.shape[0]:
        raise DatasetError(
            f"field {field.name!r} has a text of {longest(texts)} bytes; the model reads {field.shape[0]}"
        )
    return padded(texts, field.shape[0])


def ask_population(
    asked: AnyQuestion,
    population: Population,
    *,
    seed: int = 0,
    rounds: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> Answer:
    """What all clients with rows answer, in every round, as devices without any give up.

    rounds: by default as many as an answer takes.

    epsilon, delta: with noise for such a promise.

    Raises EngineError when the data lack a field, PrivacyError for a promise that cannot be, QuestionError when clients
    have more rows than their sums hold.
    """
    model, algorithm, cohort = Model(asked.spec()), asked.algorithm(), np.flatnonzero(population.sizes).tolist()
    clients = len(cohort)
    rounds = asked.rounds if rounds is None else rounds
    promise: SimulatedPrivacy | None = None
    if epsilon is not None:
        private = PrivateTraining(epsilon=epsilon, delta=1 / (10 * clients) if delta is None else delta)
        promise = promise_of(private, clients, Cohorts(clients), rounds)
    sums = None if promise is None else PrivateSums(promise, seed)
    engine = Engine(model, algorithm, with_tokens(population, model.spec), seed=seed, private=sums)
    for number in range(1, rounds + 1):
        try:
            excluded = engine.run_round(number, cohort).excluded
        except Diverged:
            excluded = clients
        if excluded:
            raise QuestionError(
                f"{excluded:,} of {clients:,} clients have more rows than exact sums hold: MAX n ROWS PER DEVICE draws "
                "some of them, or CAST what is summed AS REAL"
            )
    multiplier = 0.0 if promise is None else promise.noise_multiplier * math.sqrt(rounds)
    reference = AlgorithmRef(name_of(algorithm), settings_of(algorithm))
    return answer_of(reference, model.schema.unflatten(engine.state["params"]), multiplier, rounds)
