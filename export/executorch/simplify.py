"""A captured graph with fewer kinds of operators and fewer operators, before it is split into delegates.

Every value is contiguous from here on: torch's strides become copies, and views are free.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

aten = torch.ops.aten
Rule = Callable[[fx.Node], Any]

SAME = {aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default}
BROADCASTING = {
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div", "eq", "ge", "gt", "le", "lt", "ne")),
    *(aten.maximum.default, aten.minimum.default, aten.where.self),
}


def simplify(module: fx.GraphModule) -> fx.Graph:
    """A simplified copy of the graph of `module`; the values of constants are in their nodes' meta."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    seen: dict[Any, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], copies.__getitem__))
            continue
        copied = graph.node_copy(node, copies.__getitem__)
        value = getattr(module, str(node.target)) if node.op == "get_attr" else node.meta["val"]
        copied.meta = {"val": value, "custom": node.meta.get("custom", {})}
        copies[node] = _simpler(copied, seen)
    _drop_expansions(graph)
    graph.eliminate_dead_code()
    return graph


def _simpler(node: fx.Node, seen: dict[Any, fx.Node]) -> Any:
    """The replacement of `node`: itself, a simpler operator, or an equal earlier one."""
    if node.op != "call_function":
        return node
    rule = RULES.get(node.target)
    simpler = rule(node) if rule else node
    if simpler is not node:
        node.graph.erase_node(node)
    return _once(simpler, seen) if isinstance(simpler, fx.Node) else simpler


def _once(node: fx.Node, seen: dict[Any, fx.Node]) -> fx.Node:
    if node.op != "call_function" or node.target is aten.as_strided_copy.default:
        return node  # patches are large: gathering them again is cheaper than keeping them for the backward pass
    key = (node.target, _hashable(node.args), _hashable(node.kwargs))
    first = seen.setdefault(key, node)
    if first is not node and not node.users:
        node.graph.erase_node(node)
    return first


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(part)) for name, part in value.items())
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments; the operator determines their types."""
    return node.args


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The sizes of a node's result."""
    return tuple(int(size) for size in node.meta["val"].shape)


def like(node: fx.Node, target: Any, args: tuple[Any, ...], value: Tensor | None = None) -> fx.Node:
    """A new node before `node` that computes what `node` does, or a value like `value`."""
    with node.graph.inserting_before(node):
        new_node = node.graph.call_function(target, args)
    new_node.meta = dict(node.meta)
    if value is not None:
        new_node.meta["val"] = value
    return new_node


def _empty(node: fx.Node, shape: Sequence[int]) -> Tensor:
    value: Tensor = node.meta["val"].new_empty(tuple(shape))
    return value


def view(node: fx.Node, source: fx.Node) -> fx.Node:
    """The values of `source` in the shape of `node`; a view of a view is one."""
    while source.op == "call_function" and source.target is aten.view.default:
        source = arguments(source)[0]
    shape = shape_of(node)
    return source if shape_of(source) == shape else like(node, aten.view.default, (source, list(shape)))


def _as_strided(node: fx.Node) -> Any:
    """A view of all values in order stays a view; anything else would need strides, which are gone."""
    source = arguments(node)[0]
    before, after = source.meta["val"], node.meta["val"]
    if before.is_contiguous() and after.is_contiguous() and before.numel() == after.numel():
        return view(node, source)
    return node


def _cast(node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    if source.meta["val"].dtype == dtype:
        return source
    cast = like(node, aten._to_copy.default, (source,), source.meta["val"].to(dtype))
    cast.kwargs = {"dtype": dtype}
    return cast


def _permute(node: fx.Node) -> Any:
    """Permutations of permutations are one, and one that only moves axes of size 1 is a view."""
    source, order = arguments(node)[0], _order(node)
    if source.op == "call_function" and source.target is aten.permute.default:
        order = [source.args[1][axis] for axis in order]
        source = source.args[0]
    shape = shape_of(source)
    real = [axis for axis in order if shape[axis] != 1]
    if real == sorted(real):
        return view(node, source)
    return like(node, aten.permute.default, (source, order))


def _order(node: fx.Node) -> list[int]:
    rank = len(shape_of(node))
    if node.target is aten.permute.default:
        return [axis % rank for axis in arguments(node)[1]]
    first, second = (0, rank - 1) if node.target is aten.t.default else arguments(node)[1:3]
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return order


def _sink(node: fx.Node) -> Any:
    """Move a permutation from the operands to the result, where it may cancel with its inverse."""
    sources = [argument for argument in arguments(node) if isinstance(argument, fx.Node)]
    orders = [arguments(source)[1] if source.target is aten.permute.default else None for source in sources]
    shapes = {shape_of(source) for source in sources}
    if orders[0] is None or any(order != orders[0] for order in orders) or len(shapes) > 1:
        return node
    inner = tuple(each.args[0] if isinstance(each, fx.Node) else each for each in arguments(node))
    unpermuted = like(node, node.target, inner, _empty(node, shape_of(arguments(sources[0])[0])))
    return like(node, aten.permute.default, (unpermuted, orders[0]))


def _slice(node: fx.Node) -> Any:
    """A slice with explicit bounds; no slice if nothing is cut off."""
    defaults: tuple[Any, ...] = (0, None, None, 1)
    source, axis, start, end, step = arguments(node) + defaults[len(node.args) - 1 :]
    shape = shape_of(source)
    axis %= len(shape)
    start, end, _ = slice(start, end).indices(shape[axis])
    if (start, end, step) == (0, shape[axis], 1):
        return source
    return like(node, aten.slice.Tensor, (source, axis, start, end, step))


def _part(node: fx.Node, source: fx.Node, axis: int, start: int, length: int) -> fx.Node:
    shape = list(shape_of(source))
    if length == shape[axis]:
        return source
    shape[axis] = length
    return like(node, aten.slice.Tensor, (source, axis, start, start + length, 1), _empty(node, shape))


def _select(node: fx.Node) -> Any:
    source, axis, index = arguments(node)
    shape = shape_of(source)
    axis %= len(shape)
    return view(node, _part(node, source, axis, index % shape[axis], 1))


def _getitem(node: fx.Node) -> Any:
    """One part of a split."""
    source, index = arguments(node)
    if source.target is not aten.split_with_sizes.default:
        return node
    whole, sizes, axis = (*arguments(source), 0)[:3]
    axis %= len(shape_of(whole))
    return _part(node, whole, axis, sum(sizes[:index]), sizes[index])


def _expand(node: fx.Node) -> Any:
    source = arguments(node)[0]
    same = math.prod(shape_of(source)) == math.prod(shape_of(node))
    return view(node, source) if same else node


def _binary(node: fx.Node) -> Any:
    """alpha becomes a product in the type of the result, and a Scalar overload the Tensor one."""
    left, right = arguments(node)[:2]
    alpha = node.kwargs.get("alpha", 1)
    if alpha != 1:
        right = _cast(node, right, node.meta["val"].dtype)
        right = like(node, aten.mul.Tensor, (right, alpha), right.meta["val"])
    return _sink(like(node, TENSOR_FORMS[node.target], (left, right)))


def _power(node: fx.Node) -> Any:
    base, exponent = arguments(node)
    squared = exponent == 2 and base.meta["val"].dtype == node.meta["val"].dtype
    return _sink(like(node, aten.mul.Tensor, (base, base))) if squared else node


def _axes(node: fx.Node) -> list[int]:
    """The axes of a reduction: all of them when none are named."""
    source, named_axes = (*arguments(node), None)[:2]
    rank = len(shape_of(source))
    return sorted(axis % rank for axis in named_axes) if named_axes else list(range(rank))


def _mean(node: fx.Node) -> Any:
    source = arguments(node)[0]
    count = math.prod(shape_of(source)[axis] for axis in _axes(node))
    total = _sum(like(node, aten.sum.dim_IntList, (source, _axes(node), *arguments(node)[2:3])))
    return like(node, aten.mul.Tensor, (total, 1 / count))


def _sum(node: fx.Node) -> Any:
    """A sum over named, kept axes; axes of size 1 need no sum."""
    source = _cast(node, arguments(node)[0], node.meta["val"].dtype)
    shape = shape_of(source)
    real = [axis for axis in _axes(node) if shape[axis] != 1]
    if not real:
        return view(node, source)
    kept_shape = [1 if axis in real else size for axis, size in enumerate(shape)]
    return view(node, like(node, aten.sum.dim_IntList, (source, real, True), _empty(node, kept_shape)))


def _clamped(node: fx.Node) -> Any:
    bounds = (0, None) if node.target is aten.relu.default else (*arguments(node)[1:], None, None)[:2]
    return _sink(like(node, aten.clamp.default, (node.args[0], *bounds)))


def _where(node: fx.Node) -> Any:
    """With a constant condition, choosing zeros is a product with a constant, and choosing infinities a sum."""
    condition, number, other = arguments(node)
    if condition.op != "get_attr" or number.op != "get_attr" or number.meta["val"].numel() != 1:
        return node
    mask: Tensor = condition.meta["val"]
    value = number.meta["val"].item()
    target = {0.0: aten.mul.Tensor, -math.inf: aten.add.Tensor}.get(value)
    if target is None or other.meta["val"].dtype != torch.float32 or shape_of(other) != shape_of(node):
        return node
    neutral = 1.0 if value == 0 else 0.0
    return like(node, target, (other, _constant(node, torch.where(mask, value, neutral))))


def _constant(node: fx.Node, values: Tensor) -> fx.Node:
    with node.graph.inserting_before(node):
        constant = node.graph.get_attr(f"simplified_{node.name}")
    constant.meta = {"val": values}
    return constant


def _full(node: fx.Node) -> Any:
    number = arguments(node)[0 if node.target is aten.scalar_tensor.default else 1]
    full = like(node, aten.full.default, (list(shape_of(node)), number))
    full.kwargs = {"dtype": node.meta["val"].dtype}
    return full


def _addmm(node: fx.Node) -> Any:
    """A product and a sum, if the bias is not one vector or there is a factor."""
    bias, left, right = arguments(node)
    alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    if (alpha, beta) == (1, 1) and shape_of(bias) == shape_of(node)[1:]:
        return _product(node)
    product = _product(like(node, aten.mm.default, (left, right)))
    if alpha != 1:
        product = like(node, aten.mul.Tensor, (product, alpha))
    if beta != 1:
        bias = like(node, aten.mul.Tensor, (bias, beta), bias.meta["val"])
    return like(node, aten.add.Tensor, (product, bias))


def bmm_turned(left: Tensor, right: Tensor) -> Tensor:
    """`bmm` with the transpose of `right`. Only ever a target in a graph: for XNNPACK it is one operator."""
    return torch.bmm(left, right.transpose(1, 2))


def _product(node: fx.Node) -> Any:
    """A product with the transpose of a matrix, which costs nothing."""
    left, right = arguments(node)[-2:]
    rank = len(shape_of(right))
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    if right.target is not aten.permute.default or right.args[1] != swapped:
        return node
    target = bmm_turned if rank == 3 else aten.linear.default
    return like(node, target, (left, right.args[0], *node.args[:-2]))


def _drop_expansions(graph: fx.Graph) -> None:
    """An operator that broadcasts needs no expanded operand, unless its result would be smaller."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in BROADCASTING:
            continue
        for index, argument in enumerate(node.args):
            if not isinstance(argument, fx.Node) or argument.target is not aten.expand.default:
                continue
            operands = [argument.args[0] if k == index else other for k, other in enumerate(node.args)]
            shapes = [shape_of(operand) for operand in operands if isinstance(operand, fx.Node)]
            if tuple(np.broadcast_shapes(*shapes)) == shape_of(node):
                node.update_arg(index, argument.args[0])


TENSOR_FORMS: dict[Any, Any] = {
    aten.add.Tensor: aten.add.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
POINTWISE = [
    *(getattr(aten, name).default for name in ("abs", "ceil", "erf", "exp", "log", "maximum", "minimum", "neg")),
    *(getattr(aten, name).default for name in ("rsqrt", "sigmoid", "sqrt", "tanh")),
    *(aten.div.Tensor, aten.mul.Tensor),
]
VIEWS = [
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default),
    *(aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default),
]
RULES: dict[Any, Rule] = {
    **dict.fromkeys(POINTWISE, _sink),
    **dict.fromkeys(SAME, lambda node: node.args[0]),
    **dict.fromkeys(TENSOR_FORMS, _binary),
    **dict.fromkeys(VIEWS, lambda node: view(node, arguments(node)[0])),
    **dict.fromkeys([aten.permute.default, aten.transpose.int, aten.t.default], _permute),
    **dict.fromkeys([aten.clamp.default, aten.relu.default, aten.hardtanh.default], _clamped),
    **dict.fromkeys([aten.full.default, aten.full_like.default, aten.scalar_tensor.default], _full),
    **dict.fromkeys([aten.mean.dim, aten.mean.default], _mean),
    **dict.fromkeys([aten.sum.dim_IntList, aten.sum.default], _sum),
    aten.as_strided.default: _as_strided,
    aten._to_copy.default: lambda node: _cast(node, arguments(node)[0], node.meta["val"].dtype),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _getitem,
    aten.expand.default: _expand,
    aten.pow.Tensor_Scalar: _power,
    aten.where.self: _where,
    aten.reciprocal.default: lambda node: _sink(like(node, aten.div.Tensor, (1.0, node.args[0]))),
    aten.addmm.default: _addmm,
    aten.mm.default: _product,
    aten.bmm.default: _product,
}
