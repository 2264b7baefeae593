"""A captured graph as plain ONNX, operator by operator, for stock ONNX Runtime.

Why not `torch.onnx.export`: docs/decisions/0006-direct-onnx-writer.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch
from onnx import helper
from torch import fx
from torch._higher_order_ops.scan import scan_op

from export.capture import Captured, Port
from export.errors import UnsupportedOperator
from export.layers import layer_of
from export.onnx.graph import ONNX_TYPES, GraphBuilder
from export.onnx.loops import body_of, scan
from export.onnx.rules import TABLE

OPSET = 18
IR_VERSION = 10
# Keyword arguments that a rule may ignore, always or at one value; any other would be silently wrong.
HARMLESS = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}
NEUTRAL = {"alpha": 1, "beta": 1}


def to_onnx(captured: Captured) -> bytes:
    """Serialised ONNX of opset 18, checked; equal graphs give equal bytes.

    Raises UnsupportedOperator, naming the operator.
    """
    builder = GraphBuilder()
    _write_all(builder, captured.module, [port.name for port in captured.inputs])
    outputs = []
    for name, result in zip(captured.outputs, captured.results, strict=True):
        # An output needs a name of its own, also where it is an input or leaves twice.
        builder.nodes.append(helper.make_node("Identity", [builder.value(result)], [name]))
        shape = tuple(int(size) for size in result.meta["val"].shape)
        outputs.append(helper.make_tensor_value_info(name, ONNX_TYPES[result.meta["val"].dtype], shape))
    inputs = [_input(port) for port in captured.inputs]
    nodes, constants = _reachable(builder, set(captured.outputs))
    written = {name for node in nodes for name in node.output}
    shapes = [info for name, info in builder.shapes.items() if name in written]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants, value_info=shapes)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UnsupportedOperator(
            f"an operator of this model is written in a way that ONNX refuses: {error}"
        ) from error
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _reachable(builder: GraphBuilder, needed: set[str]) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """The nodes and constants that the outputs need: a symbolic size that became -1 leaves its arithmetic unused."""
    nodes: list[onnx.NodeProto] = []
    for node in reversed(builder.nodes):
        if needed.intersection(node.output):
            needed.update(node.input, *(inner.input for inner in body_of(node)))
            nodes.append(node)
    return nodes[::-1], [constant for constant in builder.initializers if constant.name in needed]


def _write_all(builder: GraphBuilder, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Write a traced graph whose inputs are these ONNX values."""
    given = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            builder.names[node] = next(given)
        elif node.op == "get_attr" and isinstance(value := getattr(module, str(node.target)), torch.Tensor):
            builder.names[node] = builder.constant(value.numpy())
        elif node.target is scan_op:
            builder.names[node] = scan(builder, node, _write_all)
        elif node.op == "call_function":
            builder.names[node] = _write(builder, node)


def _write(builder: GraphBuilder, node: fx.Node) -> object:
    rule = TABLE.get(node.target)
    if rule is None:
        raise UnsupportedOperator(f"operator {node.target} has no ONNX form here{layer_of(node)}")
    for name, value in node.kwargs.items():
        if name not in HARMLESS and value != NEUTRAL.get(name):
            raise UnsupportedOperator(
                f"operator {node.target} with {name}={value} has no ONNX form here{layer_of(node)}"
            )
    try:
        return rule(builder, node)
    except UnsupportedOperator as error:
        raise UnsupportedOperator(f"{error}{layer_of(node)}") from error


def _input(port: Port) -> onnx.ValueInfoProto:
    shape: tuple[int | str, ...] = ("B", *port.shape) if port.batched else port.shape
    return helper.make_tensor_value_info(port.name, ONNX_TYPES[port.dtype], shape)
