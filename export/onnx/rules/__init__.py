"""Rules that write traced operators in ONNX, one per operator. An operator not in TABLE is refused by name."""

from __future__ import annotations

from typing import Any

from export.onnx.graph import Rule
from export.onnx.rules import arithmetic, indexing, reductions, shapes, windows

TABLE: dict[Any, Rule] = {
    **arithmetic.TABLE,
    **shapes.TABLE,
    **indexing.TABLE,
    **reductions.TABLE,
    **windows.TABLE,
}
