"""Operators that move, join, cut or index values; convolution and pooling."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from export.convolution import Window
from export.errors import UnsupportedOperator
from export.onnx.graph import GraphBuilder, Rule, argument, arguments, dtype_of, overloads, rank_of

aten = torch.ops.aten
# ONNX Slice has no "to the end"; any number past the axis will do.
END = np.iinfo(np.int64).max


def same(graph: GraphBuilder, node: fx.Node) -> str:
    """The operator changes nothing that ONNX can see."""
    return graph.value(node.args[0])


def reshaped(otherwise: Rule) -> Rule:
    """Reshape directly from where the values were last moved or computed; by `otherwise` if sizes forbid it."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        source: fx.Node = arguments(node)[0]
        while _keeps_order(source):
            source = arguments(source)[0]
        if _alike(node, source):
            return graph.value(source)
        shape, source_shape = node.meta["val"].shape, source.meta["val"].shape
        sizes = _sizes(shape, source_shape)
        if 0 in shape or sizes.count(-1) > 1:
            return graph.shaped(otherwise(graph, node), node)
        name = graph.emit("Reshape", [graph.value(source), graph.constant(sizes, np.int64)], allowzero=0)
        return graph.shaped(name, node) if -1 in sizes else name

    return rule


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values have one shape."""
    return list(map(str, node.meta["val"].shape)) == list(map(str, other.meta["val"].shape))


def _keeps_order(node: fx.Node) -> bool:
    """Whether the values are those of the first argument in the same order."""
    if node.target is not aten.permute.default:
        return node.target in SHAPING or node.target in SAME
    moved = [axis for axis in _axes(node) if str(arguments(node)[0].meta["val"].shape[axis]) != "1"]
    return moved == sorted(moved)


def _axes(node: fx.Node) -> list[int]:
    """The axes of a permutation, which may count from the end."""
    return [axis % rank_of(node) for axis in arguments(node)[1]]


def _sizes(shape: Sequence[Any], source_shape: Sequence[Any]) -> list[int]:
    """Sizes as Reshape reads them: 0 keeps the axis's size, and so its symbol; -1 is the remaining size."""
    before = [*map(str, source_shape), *("" for _ in shape)]
    return [
        size if isinstance(size, int) else 0 if str(size) == had else -1
        for size, had in zip(shape, before, strict=False)
    ]


def view(graph: GraphBuilder, node: fx.Node) -> str:
    """Reshape; a size of -1 is the remaining size, and sizes may be symbolic."""
    source, sizes = arguments(node)[:2]
    return graph.emit("Reshape", [graph.value(source), graph.integers(sizes)], allowzero=0)


def as_strided(graph: GraphBuilder, node: fx.Node) -> str:
    """Reshape, for strides that lay the same values out in the same order. Raises UnsupportedOperator for others."""
    source, result = arguments(node)[0].meta["val"], node.meta["val"]
    if not (source.is_contiguous() and result.is_contiguous() and source.numel() == result.numel()):
        raise UnsupportedOperator(f"{node.target} that is more than a view")
    return view(graph, node)


def expand(graph: GraphBuilder, node: fx.Node) -> str:
    """Expand: axes of size 1, and new ones in front, are repeated; -1 keeps an axis as it is."""
    source, sizes = arguments(node)[:2]
    if _alike(node, source):
        return graph.value(source)
    sizes = [1 if size == -1 else size for size in sizes]
    return graph.shaped(graph.emit("Expand", [graph.value(node.args[0]), graph.integers(sizes)]), node)


def repeat(graph: GraphBuilder, node: fx.Node) -> str:
    """Tile, after new axes in front where there are more repeats than axes."""
    source, repeats = arguments(node)
    value, missing = graph.value(source), len(repeats) - rank_of(source)
    if missing:
        value = graph.emit("Unsqueeze", [value, graph.constant(range(missing), np.int64)])
    return graph.emit("Tile", [value, graph.integers(repeats)])


def permute(graph: GraphBuilder, node: fx.Node) -> str:
    """Transpose, once for permutations of permutations; Reshape, where only axes of size 1 move."""
    if _keeps_order(node):
        name: str = unmoved(graph, node)
        return name
    source, order = arguments(node)[0], _axes(node)
    while source.target is aten.permute.default:
        order = [_axes(source)[axis] for axis in order]
        source = arguments(source)[0]
    if order == sorted(order):
        return graph.value(source)
    return graph.emit("Transpose", [graph.value(source)], perm=order)


def transpose(graph: GraphBuilder, node: fx.Node) -> str:
    """Transpose, as it is traced."""
    return graph.emit("Transpose", [graph.value(node.args[0])], perm=_axes(node))


def unsqueeze(graph: GraphBuilder, node: fx.Node) -> str:
    """Unsqueeze: a new axis of size 1."""
    axis = graph.constant([arguments(node)[1]], np.int64)
    return graph.emit("Unsqueeze", [graph.value(node.args[0]), axis])


def squeeze(graph: GraphBuilder, node: fx.Node) -> str:
    """Squeeze of those of the named axes that are of size 1."""
    source, axes = arguments(node)
    shape = source.meta["val"].shape
    # torch keeps an axis whose size is not 1, and so a symbolic one, which may be 1.
    single = [axis for axis in axes if isinstance(shape[axis], int) and shape[axis] == 1]
    return (
        graph.emit("Squeeze", [graph.value(source), graph.constant(single, np.int64)]) if single else same(graph, node)
    )


def concatenate(graph: GraphBuilder, node: fx.Node) -> str:
    """Concat, in the type that torch promotes the parts to."""
    parts = [graph.value(part, dtype_of(node)) for part in arguments(node)[0]]
    return graph.emit("Concat", parts, axis=argument(node, 1, 0))


def split(graph: GraphBuilder, node: fx.Node) -> tuple[str, ...]:
    """Split into parts of these sizes along an axis, the first by default."""
    source, sizes = arguments(node)[:2]
    lengths = graph.constant(sizes, np.int64)
    return graph.emit_many("Split", [graph.value(source), lengths], len(sizes), axis=argument(node, 2, 0))


def slice_axis(graph: GraphBuilder, node: fx.Node) -> str:
    """Slice of one axis, unless it is whole; bounds count from the end where negative, and may be symbolic."""
    if _alike(node, arguments(node)[0]):
        return same(graph, node)
    bounds = (argument(node, 2) or 0, argument(node, 3), argument(node, 1, 0), argument(node, 4, 1))
    start, end, axis, step = (END if bound is None else bound for bound in bounds)
    inputs = [graph.integers([bound]) for bound in (start, end, axis, step)]
    return graph.emit("Slice", [graph.value(node.args[0]), *inputs])


def flip(graph: GraphBuilder, node: fx.Node) -> str:
    """Slice with steps of -1, from the last to the first of each axis."""
    source, axes = arguments(node)
    bounds = [[-1] * len(axes), [-END] * len(axes), list(axes), [-1] * len(axes)]
    return graph.emit("Slice", [graph.value(source), *(graph.integers(bound) for bound in bounds)])


def pad(graph: GraphBuilder, node: fx.Node) -> str:
    """Pad with a constant, which is 0 by default."""
    source, sides = arguments(node)[:2]
    rank, pairs = rank_of(node), len(sides) // 2
    # torch lists (before, after) from the last axis back; ONNX all befores, then all afters, from the first axis on.
    before = [0] * (rank - pairs) + [sides[2 * pair] for pair in reversed(range(pairs))]
    after = [0] * (rank - pairs) + [sides[2 * pair + 1] for pair in reversed(range(pairs))]
    fill = graph.value(argument(node, 2, 0.0), dtype_of(node))
    return graph.emit("Pad", [graph.value(source), graph.constant(before + after, np.int64), fill])


def filled(graph: GraphBuilder, node: fx.Node) -> str:
    """full, full_like and scalar_tensor: one constant, spread over a shape that may be symbolic."""
    kind = dtype_of(node)
    sizes: Any = [] if node.target is aten.scalar_tensor.default else node.args[0]
    number = node.args[0] if node.target is aten.scalar_tensor.default else arguments(node)[1]
    constant = graph.value(number, kind)
    if isinstance(sizes, fx.Node):
        return graph.emit("Expand", [constant, graph.emit("Shape", [graph.value(sizes)])])
    return graph.emit("Expand", [constant, graph.integers(sizes)]) if sizes else constant


def item(graph: GraphBuilder, node: fx.Node) -> str:
    """One of the outputs of an operator that has several."""
    source, index = arguments(node)
    name: str = graph.names[source][index]
    return name


def symbolic_size(graph: GraphBuilder, node: fx.Node) -> str:
    """Shape, cut to one axis: the size as an int64 vector of one element."""
    source, axis = arguments(node)
    return graph.emit("Shape", [graph.value(source)], start=axis, end=axis + 1)


def symbolic_numel(graph: GraphBuilder, node: fx.Node) -> str:
    """Size: the number of values as an int64 vector of one element."""
    count = graph.emit("Size", [graph.value(node.args[0])])
    return graph.emit("Reshape", [count, graph.constant([1], np.int64)])


def symbolic_arithmetic(kind: str) -> Rule:
    """Arithmetic on sizes, which are int64 vectors of one element here."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        return graph.emit(kind, [graph.integers([size]) for size in node.args])

    return rule


def numbers(graph: GraphBuilder, node: fx.Node) -> str:
    """arange; its bounds may be symbolic."""
    bounds = {1: (0, *node.args, 1), 2: (*node.args, 1), 3: node.args}[len(node.args)]
    return graph.emit("Range", [graph.value(bound, dtype_of(node)) for bound in bounds])


unmoved = reshaped(transpose)
SAME = overloads(same, aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
SHAPING: dict[Any, Rule] = {
    shaping: reshaped(rule)
    for shaping, rule in {
        aten.view.default: view,
        aten._unsafe_view.default: view,
        aten.squeeze.dims: squeeze,
        aten.unsqueeze.default: unsqueeze,
    }.items()
}
SHAPES: dict[Any, Rule] = {
    **SHAPING,
    **SAME,
    **overloads(filled, aten.full.default, aten.full_like.default, aten.scalar_tensor.default),
    **overloads(numbers, aten.arange.default, aten.arange.start, aten.arange.start_step),
    aten.as_strided.default: as_strided,
    aten.cat.default: concatenate,
    aten.constant_pad_nd.default: pad,
    aten.expand.default: expand,
    aten.flip.default: flip,
    aten.permute.default: permute,
    aten.repeat.default: repeat,
    aten.slice.Tensor: slice_axis,
    aten.split_with_sizes.default: split,
    aten.sym_numel.default: symbolic_numel,
    aten.sym_size.int: symbolic_size,
    operator.add: symbolic_arithmetic("Add"),
    operator.floordiv: symbolic_arithmetic("Div"),
    operator.getitem: item,
    operator.mul: symbolic_arithmetic("Mul"),
    operator.sub: symbolic_arithmetic("Sub"),
}


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


INDEXING: dict[Any, Rule] = {
    **overloads(scatter("none"), aten.scatter.value, aten.scatter.src),
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.index_put.default: index_put,
    aten.scatter_add.default: scatter("add"),
    aten.select.int: select,
}


def convolution(graph: GraphBuilder, node: fx.Node) -> str:
    """Conv or ConvTranspose of (batch, channels, …space): pads are the same on both sides of an axis."""
    source, weight, bias, stride, padding, dilation, transposed, output_padding, groups = arguments(node)
    inputs = [graph.value(item) for item in (source, weight, bias) if item is not None]
    window = Window.of(weight.meta["val"].shape[2:], stride, padding, dilation)
    attributes: dict[str, Any] = {
        "strides": window.stride,
        "pads": [*window.padding, *window.padding],
        "dilations": window.dilation,
        "group": groups,
    }
    if transposed:
        return graph.emit("ConvTranspose", inputs, output_padding=output_padding, **attributes)
    return graph.emit("Conv", inputs, **attributes)


def max_pool2d(graph: GraphBuilder, node: fx.Node) -> tuple[str, ...]:
    """MaxPool of (batch, channels, height, width), and the places of the maxima where they are used.

    Raises UnsupportedOperator for values of another rank.
    """
    source: fx.Node = arguments(node)[0]
    if rank_of(source) != 4:
        raise UnsupportedOperator(f"{node.target} of values that are not (batch, channels, height, width)")
    window = Window.pool(argument(node, 1), argument(node, 2, ()), argument(node, 3, [0, 0]), argument(node, 4, [1, 1]))
    # Where shapes are inferred, `ceil_mode` of ONNX counts windows that begin behind the end; where they are run, not.
    overhang = window.overhang(source.meta["val"].shape[2:]) if argument(node, 5, False) else (0, 0)
    ends = [pad + more for pad, more in zip(window.padding, overhang, strict=True)]
    attributes: dict[str, Any] = {
        "kernel_shape": window.kernel,
        "strides": window.stride,
        "pads": [*window.padding, *ends],
        "dilations": window.dilation,
    }
    if all(user.args[1] == 0 for user in node.users):
        return (graph.emit("MaxPool", [graph.value(source)], **attributes),)  # places cost ten times the maximum
    values, places = graph.emit_many("MaxPool", [graph.value(source)], 2, **attributes)
    # ONNX counts places over the whole tensor, torch within each plane.
    plane = graph.constant(int(np.prod(source.meta["val"].shape[2:])), np.int64)
    return values, graph.emit("Mod", [places, plane])


WINDOWS: dict[Any, Rule] = {
    aten.convolution.default: convolution,
    aten.max_pool2d_with_indices.default: max_pool2d,
}
