"""Inputs less their mean, over their deviation, in front of a model: frozen constants, from the answer of devices.

The constants are buffers of the model's own module, so that its parameters keep their names. Its forward gets
(x − mean) / deviation for an input x, in training and in prediction alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export.errors import InvalidModel, reason
from export.model import ModelSpec
from export.questions.builtin import NORMALISER
from fedcore.plan import DEVIATION_OF, MEAN_OF, Plan
from fedcore.questions.answer import Answer
from fedcore.validation import offered


@dataclass(frozen=True, slots=True)
class Normaliser:
    """The mean and the standard deviation of an input: one for each of its elements, row-major, or one for all."""

    field: str
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def of(cls, answer: Answer | Mapping[str, Any] | Path | str) -> Normaliser:
        """The answer to `muster ask normaliser`: itself, its JSON, or a file of that. Raises InvalidModel.

        A deviation of 0, that of a constant, becomes 1.
        """
        if isinstance(answer, Path | str):
            return cls.of(_read(Path(answer)))
        said = answer._asdict() if isinstance(answer, Answer) else answer
        rows = said.get("rows")
        if tuple(said.get("columns", ())) != NORMALISER or not rows:
            raise InvalidModel(f"this is no answer to `muster ask normaliser`: its columns are {', '.join(NORMALISER)}")
        fields, elements, means, deviations = zip(*(row[:4] for row in rows), strict=True)
        ordered = elements == (None,) or elements == tuple(range(len(rows)))
        finite = all(isinstance(one, int | float) and math.isfinite(one) for one in (*means, *deviations))
        if len(set(fields)) != 1 or not ordered or not finite or min(deviations) < 0:
            raise InvalidModel(
                f"the normaliser of {fields[0]} lacks elements, which too few devices have, or a deviation, which its "
                "bounds are too wide to tell: ask with a smaller --minimum-devices, closer bounds, or `overall`"
            )
        return cls(str(fields[0]), means, tuple(one or 1.0 for one in deviations))

    def before(self, spec: ModelSpec, *, planned: bool = False) -> ModelSpec:
        """The model behind this normaliser. planned: a model that normalises the input already stays as it is.

        Raises InvalidModel when it has no such input, or one of another shape.
        """
        names = [item.name for item in spec.inputs]
        if self.field not in names:
            raise InvalidModel(f"{spec.name} has no input {self.field!r} to normalise; {offered(self.field, names)}")
        place = names.index(self.field)
        shape = spec.inputs[place].shape
        if len(self.mean) not in (1, math.prod(shape)):
            raise InvalidModel(
                f"the normaliser is of {len(self.mean):,} elements of {self.field}, of which {spec.name} reads "
                f"{list(shape)}"
            )

        def make() -> nn.Module:
            module = spec.make()
            if not hasattr(module, MEAN_OF.format(self.field)):
                return self._put(module, place, shape if len(self.mean) > 1 else (1,))
            if planned:
                return module
            raise InvalidModel(f"{spec.name} normalises {self.field} already")

        return replace(spec, make=make)

    def _put(self, module: nn.Module, place: int, shape: Sequence[int]) -> nn.Module:
        mean, deviation = MEAN_OF.format(self.field), DEVIATION_OF.format(self.field)
        for name, values in ((mean, self.mean), (deviation, self.deviation)):
            constants = torch.tensor(values, dtype=torch.float32).reshape(tuple(shape))
            module.register_buffer(name, constants, persistent=False)

        def normalise(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if place >= len(inputs):  # a predict graph reads fewer
                return inputs
            # Of the layer that is called, as copies of a module share their hooks.
            x = (inputs[place] - layer.get_buffer(mean)) / layer.get_buffer(deviation)
            return (*inputs[:place], x, *inputs[place + 1 :])

        module.register_forward_pre_hook(normalise)
        return module


def normalised(spec: ModelSpec, answers: Sequence[Answer | Mapping[str, Any] | Path | str]) -> ModelSpec:
    """The model behind the normalisers of some of its inputs. Raises InvalidModel."""
    for answer in answers:
        spec = Normaliser.of(answer).before(spec)
    return spec


def as_planned(spec: ModelSpec, plan: Plan) -> ModelSpec:
    """The model behind the normalisers that its plan has, unless it has them itself; without their values."""
    for name, size in plan.normalised.items():
        spec = Normaliser(name, (0.0,) * size, (1.0,) * size).before(spec, planned=True)
    return spec


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path} cannot be read as the JSON of `muster ask normaliser`: {reason(error)}") from error
    return found if isinstance(found, dict) else {}
