"""A captured graph as an ExecuTorch program: XNNPACK subgraphs of all float32 arithmetic, and plain operators between.

Made from the graph directly, not by ExecuTorch's own lowering: docs/decisions/0011-executorch.md.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch

from export.capture import Captured
from export.errors import ExportError, UnsupportedOperator, quiet
from export.executorch.forms import FORMS
from export.executorch.simplify import simplify
from export.layers import layer_of

EXPORTER = "executorch 1.4.1"
TABLE = FORMS
"""The functions that `capture` traces instead of operators. Without them a graph is refused or slow."""


def to_executorch(captured: Captured) -> bytes:
    """A program with the methods `forward` and `ports`; equal graphs give equal bytes.

    Inputs and outputs of `forward` are in the order of `captured`, and lie in memory of the caller. `ports` gives their
    names: uint8 that holds {"inputs": [...], "outputs": [...]} in JSON. The batch of `captured` must be fixed.

    Raises UnsupportedOperator, naming the operator; ExportError when ExecuTorch is not installed.
    """
    for node in captured.module.graph.nodes:
        several = node.op == "call_function" and not isinstance(node.meta.get("val"), torch.Tensor)
        if several and node.target is not torch.ops.aten.split_with_sizes.default:  # whose parts become slices
            raise UnsupportedOperator(f"operator {node.target} has no ExecuTorch form here{layer_of(node)}")
    program = _program()
    names = {"inputs": [port.name for port in captured.inputs], "outputs": list(captured.outputs)}
    with warnings.catch_warnings():
        # ExecuTorch reads its own files by deprecated functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        data: bytes = program.serialize(simplify(captured.module), names)
    return data


def _program() -> ModuleType:
    """The module that loads ExecuTorch, which is optional, slow and noisy."""
    with _quiet():
        try:
            from export.executorch import program
        except ModuleNotFoundError as error:
            raise ExportError("the ExecuTorch exporter is not installed: pip install muster-fl[executorch]") from error
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the messages of ExecuTorch and its packages while they are loaded."""
    with (
        quiet("torch.utils._pytree"),
        warnings.catch_warnings(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        yield
