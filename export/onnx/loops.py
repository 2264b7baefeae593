"""Loops as ONNX's `Scan`: over time, with a number of steps that the graph states, and over local steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from torch import fx

from export.capture import Captured
from export.errors import UnsupportedOperator
from export.layers import layer_of
from export.onnx.graph import ONNX_TYPES, GraphBuilder, arguments
from fedcore.plan import CARRY, MASK, NEXT, unprefixed

WriteAll = Callable[[GraphBuilder, fx.GraphModule, Sequence[Any]], None]
"""Writes a traced graph whose inputs are the given ONNX values."""


def scan(graph: GraphBuilder, node: fx.Node, write_all: WriteAll) -> tuple[str, ...]:
    """torch's `scan`, with its body as a graph inside, which sees values and constants of the outer graph by name.

    The last value that the loop scans is a constant with an unused byte per step, which devices require to bound a loop
    (docs/spec/plan.md §2.1). Raises UnsupportedOperator for a loop over a batch.
    """
    body, state, parts, shared = arguments(node)
    module: fx.GraphModule = getattr(node.graph.owning_module, str(body.target))
    inner = module.graph.find_nodes(op="placeholder")[: len(state) + len(parts)]
    steps = parts[0].meta["val"].shape[0]
    if not isinstance(steps, int):
        raise UnsupportedOperator(f"a loop goes over the examples of a batch, not over time{layer_of(node)}")
    inputs, (step,) = graph.fresh(len(inner)), graph.fresh(1)
    (results,) = arguments(module.graph.output_node())
    body_inputs = [*_infos(inputs, inner), helper.make_tensor_value_info(step, onnx.TensorProto.UINT8, [])]
    written = _body(graph, module, [*inputs, *map(graph.value, shared)], body_inputs, results, write_all)
    scan_inputs = [*map(graph.value, (*state, *parts)), graph.constant(np.zeros(steps, np.uint8))]
    return graph.emit_many("Scan", scan_inputs, len(results), body=written, num_scan_inputs=len(parts) + 1)


def scan_steps(graph: GraphBuilder, captured: Captured, write_all: WriteAll) -> None:
    """A captured step as a loop over many, under the names at the edge of a graph of steps.

    The last value that it scans is the mask, which the device makes, so the device knows the number of turns.
    """
    ports = {port.name: (port, node) for port, node in zip(captured.inputs, captured.placeholders, strict=True)}
    results = dict(zip(captured.outputs, captured.results, strict=True))
    state = {f"{CARRY}.{name}": result for name, result in unprefixed(NEXT, results).items()}
    scanned = {name: node for name, (port, node) in ports.items() if port.batched}
    scanned[MASK] = scanned.pop(MASK)
    renamed = dict(zip((state | scanned), graph.fresh(len(state | scanned)), strict=True))
    body = _body(
        graph,
        captured.module,
        [renamed.get(name, name) for name in ports],
        _infos([*renamed.values()], [*state.values(), *scanned.values()]),
        [*results.values()],
        write_all,
    )
    graph.nodes.append(helper.make_node("Scan", [*renamed], [*results], body=body, num_scan_inputs=len(scanned)))


def _body(  # a graph with its inputs and outputs
    graph: GraphBuilder,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    body_inputs: Sequence[onnx.ValueInfoProto],
    results: Sequence[fx.Node],
    write_all: WriteAll,
) -> onnx.GraphProto:
    """A traced graph as one inside the graph."""
    with graph.inside() as nodes:
        write_all(graph, module, inputs)
        # Every result needs its own name, even if it equals another one.
        outputs = graph.fresh(len(results))
        for name, result in zip(outputs, results, strict=True):
            nodes.append(helper.make_node("Identity", [graph.value(result)], [name]))
    return helper.make_graph(nodes, "body", body_inputs, _infos(outputs, results))


def _infos(names: Sequence[str], values: Sequence[fx.Node]) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, ONNX_TYPES[value.meta["val"].dtype], None)
        for name, value in zip(names, values, strict=True)
    ]
