"""Division in predict graphs: by data it becomes a product by the reciprocal, which ONNX has of floats only."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import helper

from export.graph_bodies import bodies_of
from export.onnx.graph import GraphBuilder


def undivided(graph: GraphBuilder) -> None:
    """Rewrite every `Div` whose divisor is not a constant. One of integers becomes a graph that ONNX refuses."""
    constants = {constant.name for constant in graph.initializers}
    graph.nodes[:] = _rewritten(graph, graph.nodes, constants)


def _rewritten(graph: GraphBuilder, nodes: Collection[onnx.NodeProto], constants: set[str]) -> list[onnx.NodeProto]:
    written = []
    for node in nodes:
        for body in bodies_of(node):
            inner = _rewritten(graph, body.node, constants)
            del body.node[:]
            body.node.extend(inner)
        if node.op_type == "Div" and node.input[1] not in constants:
            (reciprocal,) = graph.fresh(1)
            written.append(helper.make_node("Reciprocal", [node.input[1]], [reciprocal]))
            written.append(helper.make_node("Mul", [node.input[0], reciprocal], list(node.output)))
        else:
            written.append(node)
    return written
