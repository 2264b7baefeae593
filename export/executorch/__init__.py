"""A captured graph as an ExecuTorch program: XNNPACK subgraphs of all float32 arithmetic, and plain operators between.

Made from the graph directly, not by ExecuTorch's own lowering: docs/decisions/0011-executorch.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from types import ModuleType

from export.capture import Captured
from export.errors import ExportError
from export.executorch.forms import FORMS
from export.executorch.simplify import simplify

EXPORTER = "executorch 1.4.1"
TABLE = FORMS
"""What `capture` is to trace instead of an operator. Without it a graph is refused or slow."""


def to_executorch(captured: Captured) -> bytes:
    """A program with the methods `forward` and `ports`; equal graphs give equal bytes.

    Inputs and outputs of `forward` are in the order of `captured`, and lie in memory of the caller. `ports` gives their
    names: uint8 that holds {"inputs": [...], "outputs": [...]} in JSON. The batch of `captured` must be fixed.

    Raises UnsupportedOperator, naming the operator; ExportError when ExecuTorch is not installed.
    """
    program = _program()
    names = {"inputs": [port.name for port in captured.inputs], "outputs": list(captured.outputs)}
    with warnings.catch_warnings():
        # ExecuTorch reads its own files by deprecated functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        data: bytes = program.serialize(simplify(captured.module), names)
    return data


def _program() -> ModuleType:
    """The rest of the exporter, which loads ExecuTorch: optional, slow and talkative."""
    with _quiet():
        try:
            from export.executorch import program  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ExportError("the ExecuTorch exporter is not installed: pip install muster-fl[executorch]") from error
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What ExecuTorch and the packages that it loads say about themselves while they are loaded is not for users."""
    logger = logging.getLogger("torch.utils._pytree")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
