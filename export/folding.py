"""Constant folding at export of values that depend on no input: positions, causal masks, their comparisons."""

from __future__ import annotations

import torch
from torch import fx

# Above this many values a constant that some operator can make on the device is not worth its bytes in the graph.
LARGEST = 1 << 16


def fold_constants(module: fx.GraphModule) -> None:
    """Replace operators on constants by their results, and remove what nothing uses."""
    constants: dict[fx.Node, torch.Tensor] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            constants[node] = getattr(module, str(node.target))
        elif _foldable(node, constants):
            value = node.target(
                *fx.map_arg(node.args, constants.__getitem__), **fx.map_arg(node.kwargs, constants.__getitem__)
            )
            name = f"folded_{node.name}"
            module.register_buffer(name, value.contiguous())
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            constants[constant] = value
    module.graph.eliminate_dead_code()


def _foldable(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() <= LARGEST
        and all(source in constants for source in node.all_input_nodes)
    )
