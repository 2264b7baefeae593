"""Loops over time as ONNX's `Scan`, whose number of steps a device can read in the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from torch import fx

from export.errors import UnsupportedOperator
from export.layers import layer_of
from export.onnx.graph import ONNX_TYPES, GraphBuilder, arguments

WriteAll = Callable[[GraphBuilder, fx.GraphModule, Sequence[Any]], None]
"""Writes a traced graph whose inputs are the given ONNX values."""


def scan(graph: GraphBuilder, node: fx.Node, write_all: WriteAll) -> tuple[str, ...]:
    """torch's `scan`, with its body as a graph inside, which sees values and constants of the outer graph by name.

    The last value that the loop goes over is a byte of each step, unused, in the graph: devices run no loop without
    (docs/spec/plan.md §2.1). Raises UnsupportedOperator for a loop over a batch.
    """
    body, state, parts, shared = arguments(node)
    module: fx.GraphModule = getattr(node.graph.owning_module, str(body.target))
    inner = module.graph.find_nodes(op="placeholder")[: len(state) + len(parts)]
    steps = parts[0].meta["val"].shape[0]
    if not isinstance(steps, int):
        raise UnsupportedOperator(f"a loop goes over the examples of a batch, not over time{layer_of(node)}")
    inputs, (step,) = graph.fresh(len(inner)), graph.fresh(1)
    with graph.inside() as nodes:
        write_all(graph, module, [*inputs, *map(graph.value, shared)])
        (results,) = arguments(module.graph.output_node())
        # A result needs a name of its own, also where it is another one too.
        outputs = graph.fresh(len(results))
        for name, result in zip(outputs, results, strict=True):
            nodes.append(helper.make_node("Identity", [graph.value(result)], [name]))
    taken = [*_infos(inputs, inner), helper.make_tensor_value_info(step, onnx.TensorProto.UINT8, [])]
    written = helper.make_graph(nodes, "body", taken, _infos(outputs, results))
    given = [*map(graph.value, (*state, *parts)), graph.constant(np.zeros(steps, np.uint8))]
    return graph.emit_many("Scan", given, len(outputs), body=written, num_scan_inputs=len(parts) + 1)


def _infos(names: Sequence[str], values: Sequence[fx.Node]) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, ONNX_TYPES[value.meta["val"].dtype], None)
        for name, value in zip(names, values, strict=True)
    ]


def body_of(node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
    """The nodes of the graph inside a node, if there is one."""
    return [inner for attribute in node.attribute for inner in attribute.g.node]
