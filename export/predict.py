"""The formats of graphs for devices, and the predict graph, with the proof that it computes what torch does.

Its proof is by trial, as that of training: each example must have the same outputs alone as among others, and the graph
on a device's runtime those of torch, for several sizes of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from torch import Tensor, fx

from device_runtime.backends.backend import Executable
from device_runtime.errors import DeviceError
from export.capture import Captured, Port, Table, capture, example_port, vector_ports
from export.decompositions import TABLE
from export.errors import (
    ExportError,
    ImpureModel,
    InvalidModel,
    ParityFailed,
    UnknownFormat,
    UnsupportedOperator,
    reason,
)
from export.inference.trained import ALIKE, SIZES, apart
from export.layers import Layers, layer_of
from export.model import Model
from export.trial import in_type, tensors_of, worst
from export.trial_examples import draw_examples, fixed_batch
from fedcore.bundle import Parity
from fedcore.checkpoint import frozen_specs_of
from fedcore.plan import EXAMPLE, FROZEN, PARAMS, PREDICT, BlobRef, Dtype, Field, PredictPlan, prefixed, unprefixed
from fedcore.validation import offered


@dataclass(frozen=True, slots=True)
class Format:
    """One form of a graph.

    version: of the format itself, such as an opset. fixed_batch: graphs have the loop's batch size fixed, and the mask
    marks fewer examples. table: the forms of operators when a step is captured. write: a captured graph as bytes.
    write_predict: a captured predict graph as bytes. write_steps: a captured step as a graph of many steps, or None if
    there is no such form of it.
    """

    name: str
    version: str
    fixed_batch: bool
    table: Table
    write: Callable[[Captured], bytes]
    write_predict: Callable[[Captured], bytes]
    write_steps: Callable[[Captured], bytes | None] = lambda _: None


def _onnx() -> Format:
    from export.onnx import OPSET, predict_to_onnx, steps_to_onnx, to_onnx

    return Format("onnx", f"opset {OPSET}", False, TABLE, to_onnx, predict_to_onnx, steps_to_onnx)


def _executorch() -> Format:
    from export.executorch import EXPORTER, TABLE, to_executorch

    return Format("executorch", EXPORTER, True, TABLE, to_executorch, to_executorch)


FORMATS: dict[str, Callable[[], Format]] = {"onnx": _onnx, "executorch": _executorch}


def formats(names: Sequence[str]) -> tuple[Format, ...]:
    """Formats by name, each once. Raises UnknownFormat."""
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise UnknownFormat(f"no format is called {', '.join(map(repr, unknown))}; {offered(unknown[0], FORMATS)}")
    return tuple(FORMATS[name]() for name in dict.fromkeys(names))


# The predict graph: a model's outputs for examples, in eval mode, and the proof that it computes what torch does.


FIXED_BATCH = 1
"""The batch of formats that fix one: an app asks about one example at a time."""
ROWS = 5
NEAR, NEAR_ZERO = 1e-4, 1e-5
"""How far outputs of an example may be apart in two batches, relative and absolute: kernels differ by the size."""
MOVED = 0.01
"""The deviation of what is added to the initial parameters, since zeros could hide a term."""
DIVIDING = {"remainder", "fmod", "floor_divide", "div"}
DIVIDES = (
    "{} divides integers by data{}; some processors end a program that divides by 0, or the least integer by -1, and "
    "a predict graph runs in the app itself: divide floats, or by a number that is neither 0 nor -1"
)
Arrays = dict[str, np.ndarray]
Progress = Callable[[str, str], None]


def build_predict(
    model: Model, targets: Sequence[str], progress: Progress = lambda form, doing: None
) -> tuple[PredictPlan, dict[BlobRef, bytes]]:
    """The part of a plan about the predict graph, and the graph in every format of `targets`.

    Raises InvalidModel for outputs that are no tensors, or of another type than devices have, ImpureModel where one
    example has an influence on the outputs of another, and as `capture`.
    """
    progress("", f"try {PREDICT}")
    evaluating = model.evaluating()
    outputs = _outputs(evaluating)
    blobs, refs = {}, {}
    for form in formats(targets):
        progress(form.name, f"trace {PREDICT}")
        captured = capture_predict(evaluating, FIXED_BATCH if form.fixed_batch else None, form.table)
        progress(form.name, f"write {PREDICT}")
        written = form.write_predict(captured)
        ref = refs[form.name] = BlobRef.of(written)
        blobs[ref] = written
    return PredictPlan(tuple(item.name for item in model.spec.asked), outputs, FIXED_BATCH, refs), blobs


def capture_predict(model: Model, batch: int | None = None, table: Table = TABLE) -> Captured:
    """Graph `predict` of a model in eval mode: parameters, frozen vectors and inputs in, outputs out.

    batch: the batch size if it is fixed. table: the forms of operators. Raises as `capture`, and UnsupportedOperator
    for a division of integers by data.
    """

    def predict(values: dict[str, Tensor]) -> dict[str, Tensor]:
        bound = model.with_frozen(unprefixed(FROZEN, values))
        return bound.predict(bound.tensors(values[PARAMS]), unprefixed(EXAMPLE, values))

    ports = [Port(PARAMS, (model.schema.size,)), *vector_ports(FROZEN, frozen_specs_of(model.frozen_vectors))]
    ports += [example_port(field) for field in model.spec.asked]
    with torch.no_grad():
        captured = capture(predict, ports, batch, Layers(model.module), table)
    for node in captured.module.graph.nodes:
        _refuse_division(captured.module, node)
    return captured


def predict_parity(
    model: Model, predict: PredictPlan, graphs: Mapping[str, Executable], *, fixed: Mapping[str, bool]
) -> dict[str, Parity]:
    """How far each format's predict graph is from torch in eval mode, by format.

    graphs: loaded, by format. fixed: whether a format's graph has the plan's batch size. Raises ParityFailed when one
    is too far off, or does not run.
    """
    evaluating, random = model.evaluating(), np.random.default_rng(0)
    params_D = model.initial + MOVED * random.standard_normal(model.initial.size, np.float32)
    examples = _inputs(evaluating, draw_examples(model.spec, max(*SIZES, predict.batch_size), random))
    found = {}
    for form, graph in graphs.items():
        sizes = (predict.batch_size,) * len(SIZES) if fixed[form] else SIZES
        starts = [place * size if fixed[form] else 0 for place, size in enumerate(sizes)]
        batches = [_rows(examples, start, size) for start, size in zip(starts, sizes, strict=True)]
        distances, own = [], []
        for batch in batches:
            expected = _torch(evaluating, params_D, batch)
            distances.append(apart(_graph(form, graph, predict, evaluating, params_D, batch), expected))
            own.append(apart(_torch(evaluating, params_D, batch, torch.float64), expected))
        if not worst(distances) <= ALIKE:
            raise ParityFailed(
                f"{model.spec.name}: {form} graph {PREDICT} is {worst(distances):.1e} (relative l2) from torch in eval "
                f"mode, allowed is {ALIKE:.0e}. Outputs that jump, as by rounding or topk, do that where values "
                "are nearly equal; if there are none, please report it"
            )
        found[form] = Parity(PREDICT, len(batches), worst(distances), worst(own))
    return found


def _outputs(model: Model) -> tuple[Field, ...]:
    """The outputs of a model in eval mode. Raises as `build_predict`."""
    examples = _inputs(model, draw_examples(model.spec, ROWS, np.random.default_rng(0)))
    try:
        together = _torch(model, model.initial, examples)
        alone = [_torch(model, model.initial, _rows(examples, row, 1)) for row in range(ROWS)]
        padded = _torch(model, model.initial, {name: np.repeat(rows[:1], ROWS, 0) for name, rows in examples.items()})
    except ExportError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise InvalidModel(
            f"{model.spec.name} does not run in eval mode on {ROWS} examples, or on one: "
            f"{fixed_batch(model) or reason(error)}"
        ) from error
    fields = []
    for name, values in together.items():
        kind = str(values.dtype)
        shapes = {outputs[name].shape for outputs in alone}
        if kind not in get_args(Dtype) or values.shape[:1] != (ROWS,) or shapes != {(1, *values.shape[1:])}:
            raise InvalidModel(
                f"{model.spec.name} gives {name} as {kind}{list(values.shape)} for {ROWS} examples; predict graphs "
                f"give {', '.join(get_args(Dtype))} with the examples on the first axis"
            )
        rows = np.concatenate([outputs[name] for outputs in alone])
        if not (_near(values, rows) and _near(padded[name], np.repeat(rows[:1], ROWS, 0))):
            raise ImpureModel(
                f"{model.spec.name} gives an example another {name} in eval mode when other examples, or padding, are "
                "in its batch; an app asks about any number at once: make the outputs of an example from it alone"
            )
        fields.append(Field(name, kind, values.shape[1:]))  # type: ignore[arg-type]
    return tuple(fields)


def _refuse_division(module: fx.GraphModule, node: fx.Node) -> None:
    """Raise UnsupportedOperator for an operator that divides integers by data, by 0 or by -1."""
    value = node.meta.get("val")
    kind = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if kind not in DIVIDING or not isinstance(value, Tensor) or value.is_floating_point():
        return
    divisor = node.args[1]
    if isinstance(divisor, fx.Node) and divisor.op == "get_attr":
        divisor = getattr(module, str(divisor.target))
    if isinstance(divisor, fx.Node) or bool(
        ((numbers := torch.as_tensor(divisor)) == 0).any() or (numbers == -1).any()
    ):
        raise UnsupportedOperator(DIVIDES.format(node.target, layer_of(node)))


def _inputs(model: Model, examples: Mapping[str, np.ndarray]) -> Arrays:
    return {item.name: np.ascontiguousarray(examples[item.name]) for item in model.spec.asked}


def _rows(examples: Arrays, start: int, count: int) -> Arrays:
    return {name: values[start : start + count] for name, values in examples.items()}


def _torch(model: Model, params_D: np.ndarray, batch: Arrays, dtype: torch.dtype = torch.float32) -> Arrays:
    """The outputs in torch, with no rewriting by the exporter except of random draws."""
    with torch.no_grad(), in_type(model, dtype) as run:
        outputs = run.predict(run.tensors(torch.from_numpy(params_D).to(dtype)), tensors_of(batch, dtype))
    return {name: output.numpy() for name, output in outputs.items()}


def _graph(
    form: str, graph: Executable, predict: PredictPlan, model: Model, params_D: np.ndarray, batch: Arrays
) -> Arrays:
    """The outputs of an exported graph."""
    count = len(next(iter(batch.values())))
    outputs = {item.name: np.empty((count, *item.shape), item.dtype) for item in predict.outputs}
    inputs = {PARAMS: params_D} | prefixed(FROZEN, model.frozen_vectors) | prefixed(EXAMPLE, batch)
    try:
        graph.run(inputs, outputs)
    except DeviceError as error:
        raise ParityFailed(f"the runtime of {form} cannot run an exported graph: {error}: {error.detail}") from error
    return outputs


def _near(some: np.ndarray, others: np.ndarray) -> bool:
    if not np.issubdtype(some.dtype, np.floating):
        return np.array_equal(some, others)
    return some.shape == others.shape and np.allclose(some, others, NEAR, NEAR_ZERO, equal_nan=True)
