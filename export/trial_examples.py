"""The examples of a trial, and what a run on them tells: a fixed batch size, and the cost of few bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from msgspec import UNSET, UnsetType

from device_runtime.capabilities import random_field
from export.errors import ExportError, InvalidModel, reason
from export.model import Model, ModelSpec
from export.weights import Codes
from fedcore.bundle import Quantisation
from fedcore.plan import Field

FEW, ROWS = 4, 2


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


def put_ends(fields: Sequence[Field], batches: Sequence[Mapping[str, np.ndarray]], random: np.random.Generator) -> None:
    """Have two or three rows of all batches, if there are more, hold nothing but the ends of each integer's range.

    Every place of a field has every end once.
    """
    size = len(next(iter(batches[0].values())))
    rows = random.permutation(len(batches) * size)
    for item in fields:
        ends = np.array(_ends(item))
        if not 0 < len(ends) < len(rows):
            continue
        first = random.integers(0, len(ends), item.shape) if item.shape else 0
        for turn, row in enumerate(rows[: len(ends)]):
            batches[row // size][item.name][row % size] = ends[(first + turn) % len(ends)]


def check_ranges(model: Model) -> None:
    """Raise InvalidModel unless the model runs in torch at the ends of the range of every integer field.

    Devices refuse examples outside of these ranges alone, so a model must take all that lies inside.
    """
    spec = model.spec
    plain = draw_examples(spec, ROWS, np.random.default_rng(0))
    if spec.examples is None:
        plain |= {item.name: np.ones_like(plain[item.name]) for item in spec.fields if (item.high or 0) > 1}
    if _failure(model, plain):
        return  # whatever the cause, it is not a range: the trace says in which layer
    for item in spec.fields:
        for end in _ends(item):
            if failure := _failure(model, plain | {item.name: np.full_like(plain[item.name], end)}):
                raise InvalidModel(
                    f"{spec.name} fails for {end} in field {item.name!r}, which may hold 0 … {_ends(item)[0]} "
                    f"({failure}); let `high` be the number of classes of a label, of rows of a table"
                )


def _failure(model: Model, examples: Mapping[str, np.ndarray]) -> str:
    """What the model fails with in torch; empty if it runs."""
    try:
        with torch.no_grad():
            model.measure({}, {name: torch.from_numpy(values) for name, values in examples.items()}, torch.ones(ROWS))
    except ExportError:
        raise
    except Exception as error:  # whatever the user's own code raises
        return reason(error)
    return ""


def _ends(item: Field) -> list[int]:
    """The largest and the least value of an integer field, and the one that is ignored, if there is one."""
    if item.high is None:
        return []
    return [item.high - 1, 0, *(() if item.ignored is UNSET else (item.ignored,))]


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


SIZES = (2, 3, 4, 5, 7, 8, 10, 16, 20, 32, 50, 64, 100, 128)


def fixed_batch(model: Model) -> str:
    """A message about a model that runs for some batch sizes and not for others; else an empty text."""
    # The same example repeated, so that only the batch size can make the model fail.
    examples = draw_examples(model.spec, 1, np.random.default_rng(0))
    first_size: dict[bool, int] = {}
    for size in SIZES:
        first_size.setdefault(
            _runs(model, {name: np.repeat(values, size, 0) for name, values in examples.items()}, size), size
        )
        if len(first_size) == 2:
            return (
                f"the model fixes its batch size: it runs for {first_size[True]} examples and not for "
                f"{first_size[False]}; write x.shape[0], or -1 in reshape, instead of the number"
            )
    return ""


def _runs(model: Model, examples: Mapping[str, np.ndarray], size: int) -> bool:
    batch = {name: torch.from_numpy(values) for name, values in examples.items()}
    try:
        with torch.no_grad():
            model.loss(model.tensors(torch.from_numpy(model.initial)), batch, torch.ones(size))
    except Exception:  # whatever the user's own code raises
        return False
    return True


EXAMPLES = 32


def cost_of_bits(model: Model) -> Quantisation | UnsetType:
    """The cost on the model's own examples, else on drawn ones; UNSET where all weights are exact.

    Raises InvalidModel.
    """
    spec, bits = model.spec, [layer.bits for layer in model.module.modules() if isinstance(layer, Codes)]
    if spec.exact is None or not bits:
        return UNSET
    drawn = draw_examples(spec, EXAMPLES, np.random.default_rng(0))
    examples = {name: torch.from_numpy(values) for name, values in drawn.items()}
    mask, params_D = torch.ones(EXAMPLES), torch.from_numpy(model.initial)
    losses = []
    for one in (model, Model(dataclasses.replace(spec, make=spec.exact), model.seed)):
        same = one.evaluating()
        with torch.no_grad():
            losses.append(float(same.loss(same.tensors(params_D), examples, mask)[0]))
    return Quantisation(bits=min(bits), loss=losses[0], exact_loss=losses[1])
