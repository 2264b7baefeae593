"""The formats of graphs for devices, and the writer of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from export.capture import Captured, Table
from export.errors import UnknownFormat
from fedcore.validation import offered


@dataclass(frozen=True, slots=True)
class Format:
    """One form of a graph.

    version: of the format itself, such as an opset. fixed_batch: graphs have the loop's batch size fixed, and the mask
    marks fewer examples. table: the forms of operators when a step is captured. write: a captured graph as bytes.
    write_predict: a captured predict graph as bytes. write_steps: a captured step as a graph of many steps, or None if
    there is no such form of it.
    """

    name: str
    version: str
    fixed_batch: bool
    table: Table
    write: Callable[[Captured], bytes]
    write_predict: Callable[[Captured], bytes]
    write_steps: Callable[[Captured], bytes | None] = lambda _: None


def _onnx() -> Format:
    from export.decompositions import TABLE
    from export.onnx import OPSET, predict_to_onnx, steps_to_onnx, to_onnx

    return Format("onnx", f"opset {OPSET}", False, TABLE, to_onnx, predict_to_onnx, steps_to_onnx)


def _executorch() -> Format:
    from export.executorch import EXPORTER, TABLE, to_executorch

    return Format("executorch", EXPORTER, True, TABLE, to_executorch, to_executorch)


FORMATS: dict[str, Callable[[], Format]] = {"onnx": _onnx, "executorch": _executorch}


def formats(names: Sequence[str]) -> tuple[Format, ...]:
    """Formats by name, each once. Raises UnknownFormat."""
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise UnknownFormat(f"no format is called {', '.join(map(repr, unknown))}; {offered(unknown[0], FORMATS)}")
    return tuple(FORMATS[name]() for name in dict.fromkeys(names))
