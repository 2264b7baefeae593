"""A captured graph as plain ONNX, operator by operator, for stock ONNX Runtime.

Why not `torch.onnx.export`: docs/decisions/0006-direct-onnx-writer.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx
import torch
from onnx import helper
from torch import fx
from torch._higher_order_ops.scan import scan_op

from export.capture import Captured, Port, vector_ports
from export.errors import UnsupportedOperator
from export.inference.onnx_model import bodies_of
from export.layers import layer_of
from export.onnx import arithmetic, shapes
from export.onnx.graph import ONNX_TYPES, GraphBuilder, Rule, scan, scan_steps, undivided, value_info
from fedcore.plan import CARRY, METRICS

TABLE: dict[Any, Rule] = {
    **arithmetic.ARITHMETIC,
    **shapes.SHAPES,
    **shapes.INDEXING,
    **arithmetic.REDUCTIONS,
    **shapes.WINDOWS,
}
"""The rule of each operator; one that is not here is refused by name."""


# A captured graph as plain ONNX, operator by operator, for stock ONNX Runtime.


OPSET = 18
IR_VERSION = 10
# Keyword arguments that a rule may ignore, always or at one value; any other would be silently wrong.
HARMLESS = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}
NEUTRAL = {"alpha": 1, "beta": 1}


def to_onnx(captured: Captured, rewrite: Callable[[GraphBuilder], None] = lambda builder: None) -> bytes:
    """Serialised ONNX of opset 18, checked; equal graphs give equal bytes. rewrite: changes the written nodes.

    Raises UnsupportedOperator, naming the operator.
    """
    builder = GraphBuilder()
    _write_all(builder, captured.module, [port.name for port in captured.inputs])
    rewrite(builder)
    for name, result in zip(captured.outputs, captured.results, strict=True):
        # Every output needs its own name, even if it is an input or is returned twice.
        builder.nodes.append(helper.make_node("Identity", [builder.value(result)], [name]))
    return _serialised(builder, [_input(port) for port in captured.inputs], _outputs(captured))


def predict_to_onnx(captured: Captured) -> bytes:
    """Write a predict graph as `to_onnx` does, with a product by the reciprocal instead of each division by data.

    A reciprocal is of floats only, so no operator that is left can divide integers by data, which may end the process
    (docs/spec/plan.md §2.1).
    """
    return to_onnx(captured, undivided)


def steps_to_onnx(captured: Captured) -> bytes | None:
    """A captured step as a graph of many steps, one after the other; None if it has a loop inside.

    Loops do not nest on devices. Raises as `to_onnx`.
    """
    if captured.module.graph.find_nodes(op="call_function", target=scan_op):
        return None
    builder = GraphBuilder()
    scan_steps(builder, captured, _write_all)
    edge = zip(captured.outputs, captured.specs, strict=True)
    carries = vector_ports(CARRY, [spec for name, spec in edge if name != METRICS])
    others = [port for port in captured.inputs if port not in carries]
    inputs = [_input(port, "S") for port in (*carries, *others)]
    return _serialised(builder, inputs, _outputs(captured, "S"))


def _serialised(
    builder: GraphBuilder, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
) -> bytes:
    nodes, needed = _reachable(builder.nodes, {output.name for output in outputs})
    constants = [constant for constant in builder.initializers if constant.name in needed]
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


def _reachable(nodes: Iterable[onnx.NodeProto], needed: set[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes that compute the needed values, and all values that these read. Others are unused, such as the
    arithmetic of a symbolic size that became -1.
    """
    reachable: list[onnx.NodeProto] = []
    for node in reversed(list(nodes)):
        if needed.intersection(node.output):
            for body in bodies_of(node):
                inner, read = _reachable(body.node, {output.name for output in body.output})
                del body.node[:]
                body.node.extend(inner)
                needed |= read
            needed.update(node.input)
            reachable.append(node)
    return reachable[::-1], needed


def _write_all(builder: GraphBuilder, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Write a traced graph whose inputs are these ONNX values."""
    input_names = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            builder.names[node] = next(input_names)
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


def _input(port: Port, *steps: str) -> onnx.ValueInfoProto:
    """An input with its shape. steps: the name of an axis of steps, if there is one."""
    shape: tuple[int | str, ...] = (*steps, "B", *port.shape) if port.batched else port.shape
    return helper.make_tensor_value_info(port.name, ONNX_TYPES[port.dtype], shape)


def _outputs(captured: Captured, *steps: str) -> list[onnx.ValueInfoProto]:
    """The outputs with their shapes; the metric sums of each of the steps, if there are any."""
    infos = []
    for name, result in zip(captured.outputs, captured.results, strict=True):
        info = value_info(name, result.meta["val"])
        if name == METRICS and steps:
            shape = [*steps, *(size.dim_value for size in info.type.tensor_type.shape.dim)]
            info = helper.make_tensor_value_info(name, info.type.tensor_type.elem_type, shape)
        infos.append(info)
    return infos
