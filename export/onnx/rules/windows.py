"""Convolution and pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from export.convolution import Window
from export.errors import UnsupportedOperator
from export.onnx.graph import GraphBuilder, Rule, argument, arguments, rank_of

aten = torch.ops.aten


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


TABLE: dict[Any, Rule] = {
    aten.convolution.default: convolution,
    aten.max_pool2d_with_indices.default: max_pool2d,
}
