"""A trained model made from its torch module: as a program of torch.export, and as an ExecuTorch program."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from device_runtime import backends
from device_runtime.errors import ConfigError, DeviceError
from export.capture import Port, capture
from export.errors import ParityFailed, UnknownFormat, UnknownModel, UnsupportedOperator, quiet, reason
from export.inference.trained import SIZES, OutputsByName, Trained, apart, check_alike
from export.layers import Layers
from export.model import Model, ModelSpec, parameter_count
from export.models import load
from export.normalising import as_planned
from export.predict import FIXED_BATCH, FORMATS
from export.rewrites import KeyedNoise
from fedcore.errors import SchemaError

ROUNDED = 1e-3
"""The largest distance of a module from its plan's graph that is round-off: a trained model may enlarge it."""


def module_of(trained: Trained, source: str | ModelSpec) -> Model:
    """The model from its source, with its trained parameters, in eval mode.

    Raises UnknownModel, InvalidModel, and SchemaError when the source is another model than the plan's, or predicts
    otherwise than the plan's graph does.
    """
    plan = trained.plan
    fields = plan.examples.fields
    if not fields:
        raise UnknownModel(f"the examples of plan {plan.name} have no fields")
    spec = load(source, fields[0].shape, fields[-1].high) if isinstance(source, str) else source
    spec = as_planned(spec, plan)
    other = f"plan {plan.name} is of another model than {spec.name}; name its model with --model"
    if parameter_count(spec) != plan.schema.size:  # before it takes memory
        raise SchemaError(other)
    model = Model(spec)
    if model.schema != plan.schema or set(model.frozen_vectors) != set(trained.frozen):
        raise SchemaError(other)
    model.freeze(trained.frozen)
    model = model.trained(trained.params)
    if plan.predict is not None and "onnx" in plan.predict.graphs and not _predicts_as_planned(trained, model):
        raise SchemaError(other)
    return model


def _predicts_as_planned(trained: Trained, model: Model) -> bool:
    drawn = trained.drawn(SIZES[0])
    ours, planned = _outputs(model, drawn), trained.outputs(drawn)
    shapes = [{name: values.shape for name, values in outputs.items()} for outputs in (ours, planned)]
    return shapes[0] == shapes[1] and apart(ours, planned) <= ROUNDED


def to_torch(trained: Trained, model: Model) -> bytes:
    """A `.pt2` file, which `torch.export.load` reads: the module in eval mode, with any batch size."""
    examples = tuple(torch.from_numpy(values) for values in trained.drawn(2).values())
    module = _Drawless(model.module) if _draws(model.module, examples) else model.module
    batch = torch.export.Dim("batch", min=1)
    shapes: Any = tuple({0: batch} for _ in examples)
    if isinstance(module, _Drawless):
        shapes = (shapes,)
    try:
        with torch.no_grad(), quiet("torch.export"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about attributes of torch's own layers
            program = torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever torch and the user's own code raise
        raise UnsupportedOperator(f"torch.export does not take this model: {reason(error)}") from error
    file = io.BytesIO()
    torch.export.save(program, file)
    run = torch.export.load(io.BytesIO(file.getvalue())).module()
    for size in SIZES:
        drawn = trained.drawn(size, seed=size)
        with torch.no_grad():
            outputs = run(*(torch.from_numpy(values) for values in drawn.values()))
        flat, _ = torch.utils._pytree.tree_flatten(outputs)
        expected = _outputs(model, drawn)
        check_alike("torch", {name: value.numpy() for name, value in zip(expected, flat, strict=True)}, expected)
    return file.getvalue()


def to_executorch(trained: Trained, model: Model) -> bytes:
    """A `.pte` program for one example, whose inputs and outputs `ports` names. Raises as the export of a plan."""
    form = FORMATS["executorch"]()
    weights = {name: value.detach().clone() for name, value in model.module.named_parameters() if value.requires_grad}
    frozen = model.with_frozen({name: torch.tensor(vector) for name, vector in trained.frozen.items()})

    def predict(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return frozen.predict(weights, values)

    fields = [item for item in trained.plan.examples.fields if item.name in trained.predict.inputs]
    ports = [Port(item.name, item.shape, getattr(torch, item.dtype), batched=True) for item in fields]
    with torch.no_grad():
        data = form.write(capture(predict, ports, FIXED_BATCH, Layers(model.module), form.table))
    try:
        graph = backends.BACKENDS[backends.FORMATS["executorch"]]().load(data)
        drawn = trained.drawn(FIXED_BATCH)
        outputs = {item.name: np.empty((FIXED_BATCH, *item.shape), item.dtype) for item in trained.predict.outputs}
        graph.run(drawn, outputs)
    except DeviceError as error:
        kind = UnknownFormat if isinstance(error, ConfigError) else ParityFailed
        raise kind(f"an ExecuTorch program cannot be tried here: {error}") from error
    check_alike("executorch", outputs, _outputs(model, drawn))
    return data


def _draws(module: nn.Module, examples: Sequence[Tensor]) -> bool:
    """Whether a module in eval mode draws random numbers all the same."""
    with torch.no_grad(), KeyedNoise(torch.zeros(len(examples[0]), dtype=torch.int32)) as noise:
        module(*examples)
    return bool(noise.turns)


class _Drawless(nn.Module):
    """A module whose random draws are their means."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """What the module gives."""
        with KeyedNoise(None):
            return self.module(*inputs)


def _outputs(model: Model, examples: OutputsByName) -> dict[str, NDArray[np.generic]]:
    with torch.no_grad():
        outputs = model.predict({}, {name: torch.from_numpy(values) for name, values in examples.items()})
    return {name: value.numpy() for name, value in outputs.items()}
