"""Indexing of values by other values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from export.errors import UnsupportedOperator
from export.onnx.graph import GraphBuilder, Rule, argument, arguments, dtype_of, overloads

aten = torch.ops.aten


def select(graph: GraphBuilder, node: fx.Node) -> str:
    """Gather at one index, which removes the axis."""
    source, axis, index = arguments(node)
    return graph.emit("Gather", [graph.value(source), graph.constant(index, np.int64)], axis=axis)


def gather(graph: GraphBuilder, node: fx.Node) -> str:
    """GatherElements: for each index the value there along an axis; the result has the shape of the indices."""
    source, axis, index = arguments(node)[:3]
    return graph.emit("GatherElements", [graph.value(source), graph.value(index)], axis=axis)


def scatter(reduction: str) -> Rule:
    """Write (or add) values at indices along an axis; a plain number is spread over the indices first."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        source, axis, index, updates = arguments(node)[:4]
        if isinstance(updates, fx.Node) and updates.meta["val"].shape != index.meta["val"].shape:
            raise UnsupportedOperator(f"{node.target} with values of another shape than the indices")
        value = graph.value(updates, dtype_of(node))
        if not isinstance(updates, fx.Node):
            value = graph.emit("Expand", [value, graph.emit("Shape", [graph.value(index)])])
        inputs = [graph.value(source), graph.value(index), value]
        return graph.emit("ScatterElements", inputs, axis=axis, reduction=reduction)

    return rule


def embedding(graph: GraphBuilder, node: fx.Node) -> str:
    """Gather of rows of a table (rows, width): the result has the shape of the indices, and `width` as last axis."""
    weight, indices = arguments(node)[:2]
    return graph.emit("Gather", [graph.value(weight), graph.value(indices)], axis=0)


def index_put(graph: GraphBuilder, node: fx.Node) -> str:
    """ScatterND on the first axis; with `accumulate` values are added. Raises UnsupportedOperator for other indices."""
    source, indices, updates = arguments(node)[:3]
    if len(indices) != 1 or indices[0].meta["val"].dtype == torch.bool:
        raise UnsupportedOperator(
            f"{node.target} with other indices than integers on the first axis; use torch.where or gather"
        )
    places = graph.emit("Unsqueeze", [graph.value(indices[0], torch.int64), graph.constant([-1], np.int64)])
    reduction = "add" if argument(node, 3, False) else "none"
    return graph.emit("ScatterND", [graph.value(source), places, graph.value(updates)], reduction=reduction)


TABLE: dict[Any, Rule] = {
    **overloads(scatter("none"), aten.scatter.value, aten.scatter.src),
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.index_put.default: index_put,
    aten.scatter_add.default: scatter("add"),
    aten.select.int: select,
}
