"""Loops over time as ONNX's `Scan`, which ends after as many steps as what it loops over has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx import helper
from torch import fx

from export.onnx.graph import ONNX_TYPES, GraphBuilder, arguments

WriteAll = Callable[[GraphBuilder, fx.GraphModule, Sequence[Any]], None]
"""Writes a traced graph whose inputs are the given ONNX values."""


def scan(graph: GraphBuilder, node: fx.Node, write_all: WriteAll) -> tuple[str, ...]:
    """torch's `scan`, with its body as a graph inside, which sees values and constants of the outer graph by name."""
    body, state, parts, shared = arguments(node)
    module: fx.GraphModule = getattr(node.graph.owning_module, str(body.target))
    inner = module.graph.find_nodes(op="placeholder")[: len(state) + len(parts)]
    inputs = graph.fresh(len(inner))
    with graph.inside() as nodes:
        write_all(graph, module, [*inputs, *map(graph.value, shared)])
        (results,) = arguments(module.graph.output_node())
        # A result needs a name of its own, also where it is another one too.
        outputs = graph.fresh(len(results))
        for name, result in zip(outputs, results, strict=True):
            nodes.append(helper.make_node("Identity", [graph.value(result)], [name]))
    written = helper.make_graph(nodes, "body", _infos(inputs, inner), _infos(outputs, results))
    given = [graph.value(value) for value in (*state, *parts)]
    return graph.emit_many("Scan", given, len(outputs), body=written, num_scan_inputs=len(parts))


def _infos(names: Sequence[str], values: Sequence[fx.Node]) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, ONNX_TYPES[value.meta["val"].dtype], None)
        for name, value in zip(names, values, strict=True)
    ]


def body_of(node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
    """The nodes of the graph inside a node, if there is one."""
    return [inner for attribute in node.attribute for inner in attribute.g.node]
