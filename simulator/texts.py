"""Texts of simulated users as a model's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import UNSET

from device_runtime.errors import DeviceError
from device_runtime.texts import TextColumn
from export.model import ModelSpec
from fedcore.plan import BlobRef
from simulator.errors import DatasetError
from simulator.population import Population


def with_tokens(users: Population, spec: ModelSpec) -> Population:
    """The same users with tokens in place of their texts, as devices make them; users without texts as they are.

    Raises DatasetError for a text that is no UTF-8, and where the tokenizer does not fit the model.
    """
    fields, blobs = dict(users.fields), {BlobRef.of(data).sha256: data for data in spec.tokenizers}
    for field in spec.fields:
        if field.tokenizer is UNSET or fields.get(field.name, np.zeros(0)).dtype != np.uint8:
            continue
        texts = fields[field.name].astype(np.uint8, copy=False)
        column = TextColumn(field, blobs[field.tokenizer.blob.sha256], field.tokenizer.padding, texts)
        try:
            fields[field.name] = column.tokens(lambda: True).ids
        except DeviceError as error:
            raise DatasetError(str(error)) from error
    return replace(users, fields=fields)
