"""The graphs inside nodes of ONNX graphs, such as the bodies of loops; for callers without torch too."""

from __future__ import annotations

import onnx


def bodies_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graph inside a node, if there is one."""
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]
