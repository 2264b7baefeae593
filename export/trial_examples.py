"""The examples of a trial: those that the ModelSpec makes, or random ones."""

from __future__ import annotations

import numpy as np

from device_runtime.footprint import random_field
from export.errors import InvalidModel, reason
from export.model import ModelSpec
from fedcore.plan import Field

FEW = 4


def draw_examples(spec: ModelSpec, count: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """`count` examples, every field (count, *shape). Raises InvalidModel when the model's own do not fit its fields."""
    if spec.examples is None:
        return {item.name: _random(item, count, random) for item in spec.fields}
    try:
        examples = dict(spec.examples(count, random))
    except Exception as error:  # whatever the user's own code raises
        raise InvalidModel(f"{spec.name}: examples({count}, generator) fails with {reason(error)}") from error
    names = [item.name for item in spec.fields]
    if sorted(examples) != sorted(names):
        raise InvalidModel(
            f"{spec.name}: examples() gives {', '.join(examples) or 'nothing'}; expected {', '.join(names)}"
        )
    return {item.name: _checked(spec.name, item, np.asarray(examples[item.name]), count) for item in spec.fields}


def _checked(model: str, item: Field, values: np.ndarray, count: int) -> np.ndarray:
    if values.shape != (count, *item.shape) or not np.can_cast(values.dtype, item.dtype, "same_kind"):
        raise InvalidModel(
            f"{model}: examples({count}, generator) gives {item.name} as {values.dtype}{list(values.shape)}; expected "
            f"{item.dtype}{[count, *item.shape]}"
        )
    if item.high is not None and not item.holds(values).all():
        raise InvalidModel(
            f"{model}: examples() gives {item.name} from {values.min()} to {values.max()}; the field says 0 … "
            f"{item.high - 1}"
        )
    return values.astype(item.dtype)


def _random(item: Field, count: int, random: np.random.Generator) -> np.ndarray:
    """Random values. Half of the integers are among the first few, so that 0 occurs and others repeat."""
    values = random_field(item, count, random)
    if item.high is None:
        return values
    few = random.integers(0, min(item.high, FEW), values.shape).astype(values.dtype)
    return np.where(random.random(values.shape) < 0.5, few, values)
