"""Part of a graph as one XNNPACK subgraph, in the form that ExecuTorch's XNNPACK backend reads.

Written directly, because ExecuTorch's own partitioner refuses products whose weights are inputs of the graph, needs
minutes for an unrolled loop, and cannot express a sum. Only float32. Format: executorch/backends/xnnpack/serialization.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as schema
from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import serialize_xnnpack_binary
from executorch.exir._serialize import _dataclass
from torch import Tensor, fx

from export.executorch.simplify import arguments, aten, bmm_turned, shape_of

# ExecuTorch's encoder reads the hints of a class anew for every field of every object: a fifth of a program's time.
_dataclass.get_type_hints = functools.cache(get_type_hints)

INTERNAL = 2**32 - 1
INPUT, OUTPUT = 1, 2
TRANSPOSED = 1
KEEP_AXES = 0x40
MOST_AXES = 6
MOST_PARTS = 5
# A sum of more terms is computed in two stages: a single running sum in float32 would lose digits.
LONGEST_SUM = 256
ALIGNMENT = 16
# More constants than this for an expansion would be a waste of bytes.
MOST_ONES = 1024


class Subgraph:
    """A growing subgraph. `ids` maps nodes to values."""

    def __init__(self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        count = len(inputs) + len(outputs)
        self._graph = schema.XNNGraph("0", [], [], count, [], [], [schema.ConstantDataOffset(0, 0, None)])
        self._constants = bytearray()
        self._numbers: dict[tuple[float, int], int] = {}
        self._external = {node: index for index, node in enumerate((*inputs, *outputs))}
        self._views: dict[tuple[int, tuple[int, ...]], int] = {}
        self.ids: dict[fx.Node, int] = {}
        for node in inputs:
            self.ids[node] = self._value(shape_of(node), self._external[node], INPUT)
            self._graph.input_ids.append(self.ids[node])

    def serialize(self) -> bytes:
        """The subgraph's bytes."""
        data: bytes = serialize_xnnpack_binary(self._graph, self._constants)
        return data

    def write(self, node: fx.Node) -> None:
        """Add the operator of a node."""
        self.ids[node] = RULES[node.target](self, node)

    def result(self, node: fx.Node) -> int:
        """A value for a node's result."""
        if node not in self._external:
            return self.new(shape_of(node))
        result = self._value(shape_of(node), self._external[node], OUTPUT)
        self._graph.output_ids.append(result)
        return result

    def new(self, shape: Sequence[int]) -> int:
        """A value inside the subgraph."""
        return self._value(shape, INTERNAL, 0)

    def operand(self, argument: Any) -> int:
        """A node's value, or a number as a constant."""
        if not isinstance(argument, fx.Node):
            return self.filled(float(argument), 1)
        if argument.op == "get_attr" and argument not in self.ids:
            self.ids[argument] = self.constant(argument.meta["val"])
        return self.ids[argument]

    def filled(self, number: float, count: int) -> int:
        """A constant vector of one number."""
        if (number, count) not in self._numbers:
            self._numbers[number, count] = self.constant(torch.full((count,), number))
        return self._numbers[number, count]

    def constant(self, values: Tensor) -> int:
        """A constant, kept within the subgraph."""
        data = values.contiguous().numpy().tobytes()
        # The last None: a key, even an empty one, would be looked up outside of the subgraph.
        self._graph.constant_data.append(schema.ConstantDataOffset(len(self._constants), len(data), None))
        self._constants += data + b"\0" * (-len(data) % ALIGNMENT)
        return self._value(values.shape, INTERNAL, 0, len(self._graph.constant_data) - 1)

    def viewed(self, source: int, shape: Sequence[int]) -> int:
        """A value in another shape."""
        key = source, tuple(shape) or (1,)
        if self.shape(source) == key[1]:
            return source
        if key not in self._views:
            self._views[key] = self.reshape(source, self.new(shape))
        return self._views[key]

    def reshape(self, source: int, target: int) -> int:
        """Copy a value into one of another shape."""
        shape = list(self.shape(target))
        self.emit(schema.XNNStaticReshape(len(shape), shape, source, target, 0))
        return target

    def emit(self, node: Any, clamp: tuple[float | None, float | None] | None = None) -> None:
        """Add an XNNPACK node."""
        limits = None
        if clamp is not None:
            low, high = clamp
            limits = schema.OutputMinMax("-inf" if low is None else low, "inf" if high is None else high)
        self._graph.xnodes.append(schema.XNode(node, 0, limits))

    def shape(self, value: int) -> tuple[int, ...]:
        """The sizes of a value."""
        return tuple(self._graph.xvalues[value].xvalue_union.dims)

    def _value(self, shape: Sequence[int], external: int, flags: int, constant: int = 0) -> int:
        value_id, sizes = len(self._graph.xvalues), list(shape) or [1]
        kind = schema.XNNDatatype.xnn_datatype_fp32
        value = schema.XNNTensorValue(kind, len(sizes), sizes, constant, external, flags, value_id)
        self._graph.xvalues.append(schema.XValue(value))
        return value_id


Rule = Callable[[Subgraph, fx.Node], int]


def delegable(node: fx.Node) -> bool:
    """Whether XNNPACK can do the operator on these values."""
    if node.op != "call_function" or node.target not in RULES:
        return False
    values = [node.meta["val"], *(source.meta["val"] for source in node.all_input_nodes)]
    check = CHECKS.get(node.target)
    return all(
        isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() > 0 and value.dim() <= MOST_AXES
        for value in values
    ) and (check is None or check(node))


def _of(kind: Any, count: int = 1, flags: int = 0) -> Rule:
    """An operator of the first `count` arguments."""

    def rule(graph: Subgraph, node: fx.Node) -> int:
        result = graph.result(node)
        graph.emit(kind(*map(graph.operand, node.args[:count]), result, flags))
        return result

    return rule


def _clamp(graph: Subgraph, node: fx.Node) -> int:
    result = graph.result(node)
    low, high = (*arguments(node)[1:], None, None)[:2]
    graph.emit(schema.XNNClamp(graph.operand(node.args[0]), result, 0), (low, high))
    return result


def _linear(graph: Subgraph, node: fx.Node) -> int:
    left, right, bias = (*arguments(node), None)[:3]
    return _product(graph, node, left, right, bias, 0)


def _mm(graph: Subgraph, node: fx.Node) -> int:
    bias, left, right = (None, *arguments(node))[-3:]
    return _product(graph, node, left, right, bias, TRANSPOSED)


def _product(graph: Subgraph, node: fx.Node, left: Any, right: Any, bias: Any, flags: int) -> int:
    result = graph.result(node)
    terms = INTERNAL if bias is None else graph.operand(bias)
    graph.emit(schema.XNNFullyConnected(graph.operand(left), graph.operand(right), terms, result, flags))
    return result


def _permute(graph: Subgraph, node: fx.Node) -> int:
    order: Any = node.args[1]
    result = graph.result(node)
    graph.emit(schema.XNNStaticTranspose(len(order), list(order), graph.operand(node.args[0]), result, 0))
    return result


def _slice(graph: Subgraph, node: fx.Node) -> int:
    source, axis, start, _, _ = arguments(node)
    shape = shape_of(node)
    offsets = [start if each == axis else 0 for each in range(len(shape))]
    result = graph.result(node)
    graph.emit(schema.XNNStaticSlice(len(shape), offsets, list(shape), graph.operand(source), result, 0))
    return result


def _join(graph: Subgraph, parts: Sequence[int], axis: int, result: int) -> int:
    kinds = [schema.XNNConcatenate2, schema.XNNConcatenate3, schema.XNNConcatenate4, schema.XNNConcatenate5]
    ids = [*parts, *[INTERNAL] * (MOST_PARTS - len(parts))]
    graph.emit(kinds[len(parts) - 2](axis, *ids[:4], result, 0, ids[4]))
    return result


def _cat(graph: Subgraph, node: fx.Node) -> int:
    parts, axis = (*arguments(node), 0)[:2]
    return _join(graph, [graph.operand(part) for part in parts], axis % len(shape_of(node)), graph.result(node))


def _repeat(graph: Subgraph, node: fx.Node) -> int:
    source, times = arguments(node)
    axis = next(axis for axis, count in enumerate(times) if count > 1)
    return _join(graph, [graph.operand(source)] * times[axis], axis, graph.result(node))


def _expand(graph: Subgraph, node: fx.Node) -> int:
    """A product with ones, because every XNNPACK operator of two values broadcasts."""
    source, shape = arguments(node)[0], shape_of(node)
    padded_shape = (1,) * (len(shape) - len(shape_of(source))) + shape_of(source)
    more = [size if have == 1 else 1 for size, have in zip(shape, padded_shape, strict=True)]
    ones = graph.viewed(graph.filled(1.0, math.prod(more)), more)
    result = graph.result(node)
    graph.emit(schema.XNNMultiply(graph.viewed(graph.operand(source), padded_shape), ones, result, 0))
    return result


def _sum(graph: Subgraph, node: fx.Node) -> int:
    """Neighbouring axes at a time, the last first."""
    source, axes, _ = arguments(node)
    shape, value = list(shape_of(source)), graph.operand(source)
    for first, last in reversed(_runs(axes)):
        outer, inner = math.prod(shape[:first]), math.prod(shape[last + 1 :])
        count = math.prod(shape[first : last + 1])
        if inner == 1:
            value = _sum_last(graph, value, outer, count)
        else:
            sides = shape[first : last + 1] if first == 1 and last == 2 else [count, 1]
            value = _sum_middle(graph, graph.viewed(value, (outer, *sides, inner)), count)
        shape[first : last + 1] = [1] * (last + 1 - first)
    return graph.reshape(value, graph.result(node))


def _runs(axes: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for axis in axes:
        if runs and runs[-1][1] == axis - 1:
            runs[-1] = runs[-1][0], axis
        else:
            runs.append((axis, axis))
    return runs


def _sum_last(graph: Subgraph, value: int, outer: int, count: int) -> int:
    """A product with ones, for which XNNPACK has the faster kernel: (outer, count) -> (1, outer)."""
    stages = [count]
    while stages[-1] > LONGEST_SUM:
        whole = stages.pop()
        part = next((size for size in range(LONGEST_SUM, 1, -1) if whole % size == 0), whole)
        stages += [part, whole // part]
        if part == whole:
            break
    for index, length in enumerate(stages):
        rows = outer * math.prod(stages[index + 1 :])
        partial = graph.new((1, rows))
        ones = graph.viewed(graph.filled(1.0, length), (1, length))
        graph.emit(schema.XNNFullyConnected(ones, graph.viewed(value, (rows, length)), INTERNAL, partial, 0))
        value = partial
    return value


def _sum_middle(graph: Subgraph, value: int, count: int) -> int:
    """An average over an image, XNNPACK's only other sum: (N, H, W, C) -> (N, 1, 1, C)."""
    outer, *_, inner = graph.shape(value)
    mean, total = graph.new((outer, 1, 1, inner)), graph.new((outer, 1, 1, inner))
    graph.emit(schema.XNNGlobalAvgPooling2d(value, mean, KEEP_AXES))
    graph.emit(schema.XNNMultiply(mean, graph.operand(float(count)), total, 0))
    return total


def _is_short_repeat(node: fx.Node) -> bool:
    source, times = arguments(node)
    more = [count for count in times if count > 1]
    return len(times) == len(shape_of(source)) and len(more) == 1 and more[0] <= MOST_PARTS


RULES: dict[Any, Rule] = {
    aten.add.Tensor: _of(schema.XNNAdd, 2),
    aten.sub.Tensor: _of(schema.XNNSubtract, 2),
    aten.mul.Tensor: _of(schema.XNNMultiply, 2),
    aten.div.Tensor: _of(schema.XNNDiv, 2),
    aten.maximum.default: _of(schema.XNNMaximum, 2),
    aten.minimum.default: _of(schema.XNNMinimum, 2),
    aten.abs.default: _of(schema.XNNAbs),
    aten.ceil.default: _of(schema.XNNCeiling),
    aten.exp.default: _of(schema.XNNExp),
    aten.floor.default: _of(schema.XNNFloor),
    aten.log.default: _of(schema.XNNLog),
    aten.neg.default: _of(schema.XNNNegate),
    aten.rsqrt.default: _of(schema.XNNReciprocalSquareRoot),
    aten.sigmoid.default: _of(schema.XNNSigmoid),
    aten.sqrt.default: _of(schema.XNNSquareRoot),
    aten.tanh.default: _of(schema.XNNTanh),
    aten._softmax.default: _of(schema.XNNSoftmax),
    aten.clamp.default: _clamp,
    aten.mm.default: _mm,
    aten.addmm.default: _mm,
    aten.linear.default: _linear,
    aten.bmm.default: _of(schema.XNNBatchMatrixMultiply, 2),
    bmm_turned: _of(schema.XNNBatchMatrixMultiply, 2, TRANSPOSED),
    aten.view.default: lambda graph, node: graph.reshape(graph.operand(node.args[0]), graph.result(node)),
    aten.permute.default: _permute,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.repeat.default: _repeat,
    aten.expand.default: _expand,
    aten.sum.dim_IntList: _sum,
}
CHECKS: dict[Any, Callable[[fx.Node], bool]] = {
    aten.slice.Tensor: lambda node: bool(arguments(node)[4] == 1),
    aten.cat.default: lambda node: 2 <= len(arguments(node)[0]) <= MOST_PARTS,
    aten.expand.default: lambda node: math.prod(shape_of(node)) <= MOST_ONES * math.prod(shape_of(arguments(node)[0])),
    aten.repeat.default: _is_short_repeat,
    aten._softmax.default: lambda node: node.args[1] in {-1, len(shape_of(node)) - 1},
}
