"""Rules that write traced operators in ONNX, one per operator. An operator not in TABLE is refused by name."""

from __future__ import annotations

from typing import Any

from export.onnx.graph import Rule
from export.onnx.rules import arithmetic, shapes

TABLE: dict[Any, Rule] = {
    **arithmetic.ARITHMETIC,
    **shapes.SHAPES,
    **shapes.INDEXING,
    **arithmetic.REDUCTIONS,
    **shapes.WINDOWS,
}
