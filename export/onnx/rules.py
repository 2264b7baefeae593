"""How each traced operator is written in ONNX. One rule per operator; what is not in TABLE is refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from export.errors import UnsupportedOperator
from export.onnx.graph import ONNX_TYPES, GraphBuilder, dtype_of, rank_of

aten = torch.ops.aten
Rule = Callable[[GraphBuilder, fx.Node], Any]
# ONNX Slice has no "to the end"; any number past the axis will do.
END = np.iinfo(np.int64).max


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments; which types they have is the operator's to say."""
    return node.args


def argument(node: fx.Node, index: int, default: Any = None) -> Any:
    """A positional argument, or its default when the trace left it out."""
    return node.args[index] if len(node.args) > index else default


def elementwise(kind: str) -> Rule:
    """An ONNX operator whose inputs must share one type: the type torch promotes to."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        left, right = (item.meta["val"] if isinstance(item, fx.Node) else item for item in arguments(node)[:2])
        common = torch.result_type(left, right)
        if kind == "Div" and not common.is_floating_point:
            common = dtype_of(node)
        return graph.emit(kind, [graph.value(item, common) for item in node.args[:2]])

    return rule


def unary(kind: str) -> Rule:
    """An ONNX operator of one input."""
    return lambda graph, node: graph.emit(kind, [graph.value(node.args[0], dtype_of(node))])


def negated(rule: Rule) -> Rule:
    """The logical opposite of a comparison."""
    return lambda graph, node: graph.emit("Not", [rule(graph, node)])


def same(graph: GraphBuilder, node: fx.Node) -> str:
    """The operator changes nothing that ONNX can see."""
    return graph.value(node.args[0])


def cast(graph: GraphBuilder, node: fx.Node) -> str:
    return graph.value(node.args[0], dtype_of(node))


def view(graph: GraphBuilder, node: fx.Node) -> str:
    source, sizes = arguments(node)[:2]
    symbolic = [size for size in sizes if isinstance(size, fx.Node)]
    if len(symbolic) == 1 and -1 not in sizes:
        sizes = [-1 if isinstance(size, fx.Node) else size for size in sizes]
    return graph.emit("Reshape", [graph.value(source), graph.integers(sizes)], allowzero=0)


def as_strided(graph: GraphBuilder, node: fx.Node) -> str:
    source, result = arguments(node)[0].meta["val"], node.meta["val"]
    if not (source.is_contiguous() and result.is_contiguous() and source.numel() == result.numel()):
        raise UnsupportedOperator(f"{node.target} that is more than a view")
    return view(graph, node)


def expand(graph: GraphBuilder, node: fx.Node) -> str:
    sizes = [1 if size == -1 else size for size in arguments(node)[1]]
    return graph.emit("Expand", [graph.value(node.args[0]), graph.integers(sizes)])


def repeat(graph: GraphBuilder, node: fx.Node) -> str:
    source, repeats = arguments(node)
    value, missing = graph.value(source), len(repeats) - rank_of(source)
    if missing:
        value = graph.emit("Unsqueeze", [value, graph.constant(range(missing), np.int64)])
    return graph.emit("Tile", [value, graph.integers(repeats)])


def permute(graph: GraphBuilder, node: fx.Node) -> str:
    rank = rank_of(node)
    axes = [axis % rank for axis in arguments(node)[1]]
    return graph.emit("Transpose", [graph.value(node.args[0])], perm=axes)


def unsqueeze(graph: GraphBuilder, node: fx.Node) -> str:
    axis = graph.constant([arguments(node)[1]], np.int64)
    return graph.emit("Unsqueeze", [graph.value(node.args[0]), axis])


def squeeze(graph: GraphBuilder, node: fx.Node) -> str:
    source, axes = arguments(node)
    shape = source.meta["val"].shape
    # torch leaves an axis that is not of size 1 alone, and so a symbolic one, which may be.
    single = [axis for axis in axes if isinstance(shape[axis], int) and shape[axis] == 1]
    return (
        graph.emit("Squeeze", [graph.value(source), graph.constant(single, np.int64)]) if single else same(graph, node)
    )


def concatenate(graph: GraphBuilder, node: fx.Node) -> str:
    parts = [graph.value(part, dtype_of(node)) for part in arguments(node)[0]]
    return graph.emit("Concat", parts, axis=argument(node, 1, 0))


def split(graph: GraphBuilder, node: fx.Node) -> tuple[str, ...]:
    source, sizes = arguments(node)[:2]
    lengths = graph.constant(sizes, np.int64)
    return graph.emit_many("Split", [graph.value(source), lengths], len(sizes), axis=argument(node, 2, 0))


def slice_axis(graph: GraphBuilder, node: fx.Node) -> str:
    bounds = (argument(node, 2) or 0, argument(node, 3), argument(node, 1, 0), argument(node, 4, 1))
    start, end, axis, step = (END if bound is None else bound for bound in bounds)
    inputs = [graph.integers([bound]) for bound in (start, end, axis, step)]
    return graph.emit("Slice", [graph.value(node.args[0]), *inputs])


def flip(graph: GraphBuilder, node: fx.Node) -> str:
    source, axes = arguments(node)
    bounds = [[-1] * len(axes), [-END] * len(axes), list(axes), [-1] * len(axes)]
    return graph.emit("Slice", [graph.value(source), *(graph.integers(bound) for bound in bounds)])


def select(graph: GraphBuilder, node: fx.Node) -> str:
    source, axis, index = arguments(node)
    return graph.emit("Gather", [graph.value(source), graph.constant(index, np.int64)], axis=axis)


def gather(graph: GraphBuilder, node: fx.Node) -> str:
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
    weight, indices = arguments(node)[:2]
    return graph.emit("Gather", [graph.value(weight), graph.value(indices)], axis=0)


def index_put(graph: GraphBuilder, node: fx.Node) -> str:
    source, indices, updates = arguments(node)[:3]
    if len(indices) != 1 or indices[0].meta["val"].dtype == torch.bool:
        raise UnsupportedOperator(f"{node.target} with other indices than integers on the first axis")
    places = graph.emit("Unsqueeze", [graph.value(indices[0]), graph.constant([-1], np.int64)])
    reduction = "add" if argument(node, 3, False) else "none"
    return graph.emit("ScatterND", [graph.value(source), places, graph.value(updates)], reduction=reduction)


def any_true(graph: GraphBuilder, node: fx.Node) -> str:
    """Whether any is true along an axis: the largest of zeros and ones."""
    number = graph.emit("Cast", [graph.value(node.args[0])], to=ONNX_TYPES[torch.int32])
    axis = graph.constant([arguments(node)[1]], np.int64)
    largest = graph.emit("ReduceMax", [number, axis], keepdims=int(argument(node, 2, False)))
    return graph.emit("Cast", [largest], to=ONNX_TYPES[torch.bool])


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


def argmax(graph: GraphBuilder, node: fx.Node) -> str:
    axis, keep = argument(node, 1), bool(argument(node, 2, False))
    if axis is None:
        raise UnsupportedOperator(f"{node.target} over all axes; name one")
    # TopK also takes the first of equal values, and on ONNX Runtime two thirds of ArgMax's time.
    inputs = [graph.value(node.args[0]), graph.constant([1], np.int64)]
    _, places = graph.emit_many("TopK", inputs, 2, axis=axis)
    return places if keep else graph.emit("Squeeze", [places, graph.constant([axis], np.int64)])


def filled(graph: GraphBuilder, node: fx.Node) -> str:
    """full, full_like and scalar_tensor: one constant, spread over a shape that may be symbolic."""
    kind = dtype_of(node)
    sizes: Any = [] if node.target is aten.scalar_tensor.default else node.args[0]
    number = node.args[0] if node.target is aten.scalar_tensor.default else arguments(node)[1]
    constant = graph.value(number, kind)
    if isinstance(sizes, fx.Node):
        return graph.emit("Expand", [constant, graph.emit("Shape", [graph.value(sizes)])])
    return graph.emit("Expand", [constant, graph.integers(sizes)]) if sizes else constant


def where(graph: GraphBuilder, node: fx.Node) -> str:
    condition, yes, no = arguments(node)
    kind = dtype_of(node)
    return graph.emit("Where", [graph.value(condition), graph.value(yes, kind), graph.value(no, kind)])


def power(graph: GraphBuilder, node: fx.Node) -> str:
    base, exponent = graph.value(node.args[0]), arguments(node)[1]
    if exponent == 2:
        return graph.emit("Mul", [base, base])
    if exponent == 0.5:
        return graph.emit("Sqrt", [base])
    return graph.emit("Pow", [base, graph.value(exponent, dtype_of(node))])


def rsqrt(graph: GraphBuilder, node: fx.Node) -> str:
    return graph.emit("Reciprocal", [graph.emit("Sqrt", [graph.value(node.args[0])])])


def logical(kind: str) -> Rule:
    """A connective of truth values; on integers torch's operator works bit by bit, which this is not."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        if dtype_of(node) != torch.bool:
            raise UnsupportedOperator(f"{node.target} on integers")
        return graph.emit(kind, [graph.value(item, torch.bool) for item in node.args])

    return rule


def expm1(graph: GraphBuilder, node: fx.Node) -> str:
    kind = dtype_of(node)
    return graph.emit("Sub", [graph.emit("Exp", [graph.value(node.args[0], kind)]), graph.value(1, kind)])


def log1p(graph: GraphBuilder, node: fx.Node) -> str:
    kind = dtype_of(node)
    return graph.emit("Log", [graph.emit("Add", [graph.value(node.args[0], kind), graph.value(1, kind)])])


def addmm(graph: GraphBuilder, node: fx.Node) -> str:
    bias, left, right = (graph.value(item) for item in arguments(node))
    return graph.emit("Gemm", [left, right, bias])


def clamp(graph: GraphBuilder, node: fx.Node) -> str:
    kind = dtype_of(node)
    bounds = ["" if bound is None else graph.value(bound, kind) for bound in (argument(node, 1), argument(node, 2))]
    return graph.emit("Clip", [graph.value(node.args[0]), *bounds])


def pad(graph: GraphBuilder, node: fx.Node) -> str:
    source, sides = arguments(node)[:2]
    rank, pairs = rank_of(node), len(sides) // 2
    # torch lists (before, after) from the last axis back; ONNX all befores, then all afters, from the first axis on.
    before = [0] * (rank - pairs) + [sides[2 * pair] for pair in reversed(range(pairs))]
    after = [0] * (rank - pairs) + [sides[2 * pair + 1] for pair in reversed(range(pairs))]
    fill = graph.value(argument(node, 2, 0.0), dtype_of(node))
    return graph.emit("Pad", [graph.value(source), graph.constant(before + after, np.int64), fill])


def convolution(graph: GraphBuilder, node: fx.Node) -> str:
    source, weight, bias, stride, padding, dilation, transposed, output_padding, groups = arguments(node)
    inputs = [graph.value(item) for item in (source, weight, bias) if item is not None]
    attributes: dict[str, Any] = {
        "strides": stride,
        "pads": [*padding, *padding],
        "dilations": dilation,
        "group": groups,
    }
    if transposed:
        return graph.emit("ConvTranspose", inputs, output_padding=output_padding, **attributes)
    return graph.emit("Conv", inputs, **attributes)


def max_pool2d(graph: GraphBuilder, node: fx.Node) -> tuple[str, ...]:
    source: fx.Node = arguments(node)[0]
    if rank_of(source) != 4:
        raise UnsupportedOperator(f"{node.target} of values that are not (batch, channels, height, width)")
    kernel = argument(node, 1)
    padding = argument(node, 3, [0, 0])
    attributes: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": argument(node, 2) or kernel,
        "pads": [*padding, *padding],
        "dilations": argument(node, 4, [1, 1]),
        "ceil_mode": int(argument(node, 5, False)),
    }
    if all(user.args[1] == 0 for user in node.users):
        return (graph.emit("MaxPool", [graph.value(source)], **attributes),)  # places cost ten times the maximum
    values, places = graph.emit_many("MaxPool", [graph.value(source)], 2, **attributes)
    # ONNX counts places over the whole tensor, torch within each plane.
    plane = graph.constant(int(np.prod(source.meta["val"].shape[2:])), np.int64)
    return values, graph.emit("Mod", [places, plane])


def item(graph: GraphBuilder, node: fx.Node) -> str:
    source, index = arguments(node)
    name: str = graph.names[source][index]
    return name


def symbolic_size(graph: GraphBuilder, node: fx.Node) -> str:
    source, axis = arguments(node)
    return graph.emit("Shape", [graph.value(source)], start=axis, end=axis + 1)


def symbolic_numel(graph: GraphBuilder, node: fx.Node) -> str:
    count = graph.emit("Size", [graph.value(node.args[0])])
    return graph.emit("Reshape", [count, graph.constant([1], np.int64)])


def symbolic_arithmetic(kind: str) -> Rule:
    """Arithmetic on sizes, which are int64 vectors of one element here."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        return graph.emit(kind, [graph.integers([size]) for size in node.args])

    return rule


def overloads(rule: Rule, *operators: Any) -> dict[Any, Rule]:
    """One rule for several operators."""
    return dict.fromkeys(operators, rule)


def unary_table(names: Sequence[tuple[Any, str]]) -> dict[Any, Rule]:
    """Unary rules by operator."""
    return {target: unary(kind) for target, kind in names}


TABLE: dict[Any, Rule] = {
    **overloads(elementwise("Add"), aten.add.Tensor, aten.add.Scalar),
    **overloads(elementwise("Sub"), aten.sub.Tensor, aten.sub.Scalar),
    **overloads(elementwise("Mul"), aten.mul.Tensor, aten.mul.Scalar),
    **overloads(elementwise("Div"), aten.div.Tensor, aten.div.Scalar),
    **overloads(elementwise("Equal"), aten.eq.Tensor, aten.eq.Scalar),
    **overloads(negated(elementwise("Equal")), aten.ne.Tensor, aten.ne.Scalar),
    **overloads(elementwise("Less"), aten.lt.Tensor, aten.lt.Scalar),
    **overloads(elementwise("LessOrEqual"), aten.le.Tensor, aten.le.Scalar),
    **overloads(elementwise("Greater"), aten.gt.Tensor, aten.gt.Scalar),
    **overloads(elementwise("GreaterOrEqual"), aten.ge.Tensor, aten.ge.Scalar),
    **overloads(elementwise("Max"), aten.maximum.default),
    **overloads(elementwise("Min"), aten.minimum.default),
    **unary_table(
        [
            (aten.abs.default, "Abs"),
            (aten.cos.default, "Cos"),
            (aten.erf.default, "Erf"),
            (aten.exp.default, "Exp"),
            (aten.log.default, "Log"),
            (aten.bitwise_not.default, "Not"),
            (aten.logical_not.default, "Not"),
            (aten.neg.default, "Neg"),
            (aten.reciprocal.default, "Reciprocal"),
            (aten.relu.default, "Relu"),
            (aten.sigmoid.default, "Sigmoid"),
            (aten.sin.default, "Sin"),
            (aten.sqrt.default, "Sqrt"),
            (aten.tanh.default, "Tanh"),
        ]
    ),
    **overloads(elementwise("MatMul"), aten.mm.default, aten.bmm.default),
    **overloads(logical("And"), aten.bitwise_and.Tensor, aten.logical_and.default),
    **overloads(logical("Or"), aten.bitwise_or.Tensor, aten.logical_or.default),
    **overloads(same, aten.alias.default, aten.clone.default, aten.detach.default),
    **overloads(cast, aten._to_copy.default),
    **overloads(view, aten.view.default, aten._unsafe_view.default),
    **overloads(filled, aten.full.default, aten.full_like.default, aten.scalar_tensor.default),
    **overloads(scatter("none"), aten.scatter.value, aten.scatter.src),
    aten.scatter_add.default: scatter("add"),
    aten.sum.dim_IntList: reduce("ReduceSum"),
    **overloads(reduce("ReduceMean"), aten.mean.dim, aten.mean.default),
    aten.amax.default: reduce("ReduceMax"),
    aten._log_softmax.default: softmax("LogSoftmax"),
    aten._softmax.default: softmax("Softmax"),
    aten.addmm.default: addmm,
    aten.any.dim: any_true,
    aten.argmax.default: argmax,
    aten.as_strided.default: as_strided,
    aten.cat.default: concatenate,
    aten.clamp.default: clamp,
    aten.constant_pad_nd.default: pad,
    aten.convolution.default: convolution,
    aten.embedding.default: embedding,
    aten.expand.default: expand,
    aten.flip.default: flip,
    aten.gather.default: gather,
    aten.index_put.default: index_put,
    aten.expm1.default: expm1,
    aten.log1p.default: log1p,
    aten.max_pool2d_with_indices.default: max_pool2d,
    aten.permute.default: permute,
    aten.pow.Tensor_Scalar: power,
    aten.repeat.default: repeat,
    aten.rsqrt.default: rsqrt,
    aten.select.int: select,
    aten.slice.Tensor: slice_axis,
    aten.split_with_sizes.default: split,
    aten.squeeze.dims: squeeze,
    aten.sym_numel.default: symbolic_numel,
    aten.sym_size.int: symbolic_size,
    aten.unsqueeze.default: unsqueeze,
    aten.where.self: where,
    operator.add: symbolic_arithmetic("Add"),
    operator.floordiv: symbolic_arithmetic("Div"),
    operator.getitem: item,
    operator.mul: symbolic_arithmetic("Mul"),
    operator.sub: symbolic_arithmetic("Sub"),
}
