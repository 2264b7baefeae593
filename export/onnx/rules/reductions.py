"""Sums, means, extremes and softmax along axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from export.errors import UnsupportedOperator
from export.onnx.graph import GraphBuilder, Rule, argument, arguments, dtype_of, overloads, rank_of

aten = torch.ops.aten


def reduce(kind: str) -> Rule:
    """A reduction over axes (all of them when none are named)."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        axes = argument(node, 1) or ()
        inputs = [graph.value(node.args[0], dtype_of(node))]
        if axes:
            inputs.append(graph.constant(list(axes), np.int64))
        return graph.emit(kind, inputs, keepdims=int(argument(node, 2, False)))

    return rule


def softmax(kind: str) -> Rule:
    """A normalised exponential along one axis."""
    return lambda graph, node: graph.emit(
        kind, [graph.value(node.args[0], dtype_of(node))], axis=arguments(node)[1] % rank_of(node)
    )


def extreme_place(largest: bool) -> Rule:
    """The index of the largest (or smallest) value along an axis; among equal ones, the first."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        axis, keep = argument(node, 1), bool(argument(node, 2, False))
        if axis is None:
            raise UnsupportedOperator(f"{node.target} over all axes; name one")
        # TopK also takes the first of equal values, and on ONNX Runtime two thirds of ArgMax's time.
        inputs = [graph.value(node.args[0]), graph.constant([1], np.int64)]
        order = {} if largest else {"largest": 0}
        _, places = graph.emit_many("TopK", inputs, 2, axis=axis, **order)
        return places if keep else graph.emit("Squeeze", [places, graph.constant([axis], np.int64)])

    return rule


def cumulative_sum(graph: GraphBuilder, node: fx.Node) -> str:
    """CumSum along an axis, in the type of the result."""
    source, axis = arguments(node)[:2]
    return graph.emit("CumSum", [graph.value(source, dtype_of(node)), graph.constant(axis, np.int64)])


def largest_values(graph: GraphBuilder, node: fx.Node) -> tuple[str, ...]:
    """TopK: the k largest or smallest values along an axis, in order, and their places."""
    count = graph.constant([arguments(node)[1]], np.int64)
    axis, largest = argument(node, 2, -1), int(argument(node, 3, True))
    return graph.emit_many("TopK", [graph.value(node.args[0]), count], 2, axis=axis, largest=largest)


TABLE: dict[Any, Rule] = {
    **overloads(reduce("ReduceMean"), aten.mean.dim, aten.mean.default),
    aten._log_softmax.default: softmax("LogSoftmax"),
    aten._softmax.default: softmax("Softmax"),
    aten.amax.default: reduce("ReduceMax"),
    aten.amin.default: reduce("ReduceMin"),
    aten.argmax.default: extreme_place(largest=True),
    aten.argmin.default: extreme_place(largest=False),
    aten.cumsum.default: cumulative_sum,
    aten.topk.default: largest_values,
    aten.sum.dim_IntList: reduce("ReduceSum"),
}
