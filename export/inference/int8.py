"""int8 by ONNX Runtime's own quantiser: weights in a byte each, activations as each run needs; and what it costs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from device_runtime.backends.onnxruntime import module_of
from export.errors import UnsupportedOperator, quiet
from export.inference.onnx_model import all_nodes
from export.inference.trained import OutputsByName
from fedcore.plan import Field


@dataclass(frozen=True, slots=True)
class Cost:
    """What int8 costs on some examples.

    largest: the largest difference of any output from float, and largest_output what it compares with. accuracy: before
    and after, the share of labels that the largest output hits; None without labels of classes.
    """

    examples: int
    largest: float
    largest_output: float
    accuracy: tuple[float, float] | None


def quantised(model: bytes) -> bytes:
    """A plain ONNX model with weights of products and convolutions in uint8 (dynamic quantisation).

    Raises UnsupportedOperator where nothing could be quantised.
    """
    quantization = module_of("onnxruntime.quantization")
    options = {"EnableSubgraph": True, "MatMulConstBOnly": True}
    with tempfile.TemporaryDirectory() as folder, quiet("root"):
        path = Path(folder) / "model.onnx"
        # Stock ONNX Runtime multiplies by int8 weights in products only, by uint8 ones in convolutions too.
        whole = onnx.load_model_from_string(model)
        quantization.quantize_dynamic(whole, path, weight_type=quantization.QuantType.QUInt8, extra_options=options)
        data = path.read_bytes()
    graph = onnx.load_model_from_string(data).graph
    if not any(node.op_type.endswith("Integer") for node in all_nodes(graph)):
        raise UnsupportedOperator(
            "ONNX Runtime quantises products and convolutions by weights, of which this model has none: leave out int8"
        )
    return data


def run(model: bytes, examples: OutputsByName) -> dict[str, NDArray[np.generic]]:
    """The outputs of a plain ONNX model in stock ONNX Runtime."""
    onnxruntime = module_of("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    read = {item.name: examples[item.name] for item in session.get_inputs()}
    return dict(zip((item.name for item in session.get_outputs()), session.run(None, read), strict=True))


def cost_of(before: bytes, after: bytes, examples: OutputsByName, label: Field | None) -> Cost:
    """What the second model's outputs differ by from the first one's. label: the field of classes, if there is one."""
    ours, theirs = run(after, examples), run(before, examples)
    largest = max(
        float(np.abs(ours[name].astype(float) - theirs[name].astype(float)).max(initial=0)) for name in theirs
    )
    output = max(float(np.abs(values.astype(float)).max(initial=0)) for values in theirs.values())
    count = len(next(iter(examples.values())))
    accuracy = None
    if label is not None and label.name in examples and len(theirs) == 1:
        hits = [_accuracy(next(iter(outputs.values())), examples[label.name]) for outputs in (theirs, ours)]
        accuracy = (hits[0], hits[1]) if hits[0] is not None and hits[1] is not None else None
    return Cost(count, largest, output, accuracy)


def _accuracy(outputs: NDArray[np.generic], labels: NDArray[np.generic]) -> float | None:
    """The share of labels (…,) that are the place of the largest of outputs (…, classes); None for other shapes."""
    if labels.dtype.kind == "f" or outputs.shape[:-1] != labels.shape:
        return None
    return float((outputs.argmax(-1) == labels).mean())
