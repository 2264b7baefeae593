"""Elementwise arithmetic, comparisons and functions; sums, means, extremes and softmax along axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from export.errors import UnsupportedOperator
from export.onnx.graph import GraphBuilder, Rule, argument, arguments, dtype_of, overloads, rank_of

aten = torch.ops.aten
# ONNX has no arithmetic of booleans; these are torch's meanings.
ON_TRUTH = {"Add": "Or", "Mul": "And", "Max": "Or", "Min": "And"}


def elementwise(kind: str) -> Rule:
    """An ONNX operator whose inputs must share one type: the type torch promotes to."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        left, right = (item.meta["val"] if isinstance(item, fx.Node) else item for item in arguments(node)[:2])
        common = torch.result_type(left, right)
        if kind == "Div" and not common.is_floating_point:
            common = dtype_of(node)
        written = ON_TRUTH.get(kind, kind) if common == torch.bool else kind
        return graph.emit(written, [graph.value(item, common) for item in node.args[:2]])

    return rule


def unary(kind: str) -> Rule:
    """An ONNX operator of one input."""
    return lambda graph, node: graph.emit(kind, [graph.value(node.args[0], dtype_of(node))])


def negated(rule: Rule) -> Rule:
    """The logical opposite of a comparison."""
    return lambda graph, node: graph.emit("Not", [rule(graph, node)])


def logical(kind: str) -> Rule:
    """A connective of booleans. Raises UnsupportedOperator for integers, on which torch's operator is bitwise."""

    def rule(graph: GraphBuilder, node: fx.Node) -> str:
        if dtype_of(node) != torch.bool:
            raise UnsupportedOperator(f"{node.target} on integers")
        return graph.emit(kind, [graph.value(item, torch.bool) for item in node.args])

    return rule


def bitwise_not(graph: GraphBuilder, node: fx.Node) -> str:
    """Not, of booleans; of integers the number whose bits are all set, minus the value."""
    kind = dtype_of(node)
    if kind == torch.bool:
        return graph.emit("Not", [graph.value(node.args[0])])
    every = graph.value(torch.iinfo(kind).max if kind == torch.uint8 else -1, kind)
    return graph.emit("Sub", [every, graph.value(node.args[0])])


def modulo(graph: GraphBuilder, node: fx.Node) -> str:
    """Mod, with the sign of the divisor. Raises UnsupportedOperator for numbers that are not whole."""
    kind = dtype_of(node)
    if kind.is_floating_point:
        raise UnsupportedOperator(f"{node.target} of numbers that are not whole")
    return graph.emit("Mod", [graph.value(item, kind) for item in node.args])


def floor_divide(graph: GraphBuilder, node: fx.Node) -> str:
    """Floor of a quotient. Of whole numbers the value without the remainder is divided, as Div truncates towards 0."""
    divided, divisor = (graph.value(item, dtype_of(node)) for item in node.args)
    if dtype_of(node).is_floating_point:
        return graph.emit("Floor", [graph.emit("Div", [divided, divisor])])
    return graph.emit("Div", [graph.emit("Sub", [divided, modulo(graph, node)]), divisor])


def cast(graph: GraphBuilder, node: fx.Node) -> str:
    """Cast, if the type changes."""
    return graph.value(node.args[0], dtype_of(node))


def power(graph: GraphBuilder, node: fx.Node) -> str:
    """Pow by a number; squares and square roots have their own operators."""
    base, exponent = graph.value(node.args[0], dtype_of(node)), arguments(node)[1]
    if exponent == 2:
        return graph.emit("Mul", [base, base])
    if exponent == 0.5:
        return graph.emit("Sqrt", [base])
    return graph.emit("Pow", [base, graph.value(exponent, dtype_of(node))])


def rsqrt(graph: GraphBuilder, node: fx.Node) -> str:
    """1 / √x as a power: ONNX has no operator for it."""
    return graph.emit("Pow", [graph.value(node.args[0]), graph.value(-0.5, dtype_of(node))])


def expm1(graph: GraphBuilder, node: fx.Node) -> str:
    """exp(x) − 1, which loses digits for a small x; ONNX has no operator for it."""
    kind = dtype_of(node)
    return graph.emit("Sub", [graph.emit("Exp", [graph.value(node.args[0], kind)]), graph.value(1, kind)])


def log1p(graph: GraphBuilder, node: fx.Node) -> str:
    """log(1 + x), plus the rounding error of 1 + x over 1 + x, which for a small x is nearly everything."""
    kind = dtype_of(node)
    value, one = graph.value(node.args[0], kind), graph.value(1, kind)
    larger = graph.emit("Add", [value, one])
    added, log = graph.emit("Sub", [larger, one]), graph.emit("Log", [larger])
    lost = graph.emit("Div", [graph.emit("Sub", [value, added]), larger])
    # At -1 and at infinity nothing is lost, but `lost` is not a number.
    exact = graph.emit("Equal", [value, added])
    return graph.emit("Where", [exact, log, graph.emit("Add", [log, lost])])


def clamp(graph: GraphBuilder, node: fx.Node) -> str:
    """Clip to bounds, of which one may be missing."""
    kind = dtype_of(node)
    bounds = ["" if bound is None else graph.value(bound, kind) for bound in (argument(node, 1), argument(node, 2))]
    return graph.emit("Clip", [graph.value(node.args[0]), *bounds])


def where(graph: GraphBuilder, node: fx.Node) -> str:
    """Where, with both values in the type of the result."""
    kind = dtype_of(node)
    condition, yes, no = (
        graph.value(item, want) for item, want in zip(arguments(node), (None, kind, kind), strict=True)
    )
    if kind == torch.bool:  # which ONNX Runtime does not choose
        yes, no = graph.emit("And", [condition, yes]), graph.emit("And", [graph.emit("Not", [condition]), no])
        return graph.emit("Or", [yes, no])
    return graph.emit("Where", [condition, yes, no])


def addmm(graph: GraphBuilder, node: fx.Node) -> str:
    """Gemm: bias + left · right, (rows, inner) times (inner, columns)."""
    bias, left, right = (graph.value(item) for item in arguments(node))
    return graph.emit("Gemm", [left, right, bias])


UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "erf", "exp", "floor", "log", "neg", "reciprocal", "relu"),
    *("round", "sigmoid", "sign", "sin", "sqrt", "tanh"),
)
"""Operators of one input that ONNX calls as torch does, with a capital."""
ARITHMETIC: dict[Any, Rule] = {
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
    **overloads(elementwise("MatMul"), aten.mm.default, aten.bmm.default),
    **overloads(elementwise("Pow"), aten.pow.Scalar, aten.pow.Tensor_Tensor),
    **overloads(modulo, aten.remainder.Scalar, aten.remainder.Tensor),
    **overloads(logical("And"), aten.bitwise_and.Tensor, aten.logical_and.default),
    **overloads(logical("Or"), aten.bitwise_or.Tensor, aten.logical_or.default),
    **{getattr(aten, name).default: unary(name.capitalize()) for name in UNARY},
    aten.maximum.default: elementwise("Max"),
    aten.minimum.default: elementwise("Min"),
    aten.bitwise_not.default: bitwise_not,
    aten.logical_not.default: unary("Not"),
    aten._to_copy.default: cast,
    aten.addmm.default: addmm,
    aten.clamp.default: clamp,
    aten.expm1.default: expm1,
    aten.floor_divide.default: floor_divide,
    aten.log1p.default: log1p,
    aten.pow.Tensor_Scalar: power,
    aten.rsqrt.default: rsqrt,
    aten.where.self: where,
}


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


REDUCTIONS: dict[Any, Rule] = {
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
