"""Texts of simulated users as a model's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from msgspec import UNSET

from device_runtime.errors import DeviceError
from device_runtime.examples.source import padded, unpadded
from device_runtime.texts import TextColumn
from export.model import ModelSpec
from fedcore.plan import BlobRef, Field
from simulator.errors import DatasetError
from simulator.population import Array, Population, longest


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
