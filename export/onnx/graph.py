"""The growing ONNX graph: nodes, deduplicated constants, casts and division; and loops as ONNX's `Scan`."""

from __future__ import annotations

import contextlib
import re
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import fx

from export.capture import Captured
from export.errors import UnsupportedOperator
from export.inference.onnx_model import bodies_of
from export.layers import layer_of
from fedcore.plan import CARRY, MASK, NEXT, unprefixed

ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}
# The least number of values of a constant for which a cast is worthwhile.
LARGE = 1024
NUMPY_TYPES = {kind: helper.tensor_dtype_to_np_dtype(code) for kind, code in ONNX_TYPES.items()}


class GraphBuilder:
    """Collects ONNX nodes. `names` maps an fx node to the ONNX value (or tuple of values) that holds its result."""

    def __init__(self) -> None:
        self.nodes = self._outermost = list[onnx.NodeProto]()
        self.initializers: list[onnx.TensorProto] = []
        self.shapes: dict[str, onnx.ValueInfoProto] = {}
        self.names: dict[fx.Node, Any] = {}
        self._known: ChainMap[tuple[bytes, int], tuple[str, ...]] = ChainMap()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def emit(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self.emit_many(kind, inputs, 1, **attributes)[0]

    def emit_many(self, kind: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> tuple[str, ...]:
        """Add a node and return the names of its outputs; equal nodes are one."""
        node = helper.make_node(kind, list(inputs), [], **attributes)
        key = node.SerializeToString(deterministic=True), outputs
        if key not in self._known:
            self._known[key] = self.fresh(outputs)
            node.output.extend(self._known[key])
            self.nodes.append(node)
        return self._known[key]

    def fresh(self, count: int) -> tuple[str, ...]:
        """Names that no value has yet."""
        names = tuple(f"v{self._count + index}" for index in range(count))
        self._count += count
        return names

    def shaped(self, name: str, node: fx.Node) -> str:
        """State the shape of a value that cannot be inferred from the graph. Returns the same name.

        ONNX Runtime reuses memory only between values that it knows to have equal shapes. Memory that cannot be reused
        lengthens the search for every later value: planning takes time quadratic in their number.
        """
        if self.nodes is self._outermost:
            self.shapes[name] = value_info(name, node.meta["val"])
        return name

    @contextlib.contextmanager
    def inside(self) -> Iterator[list[onnx.NodeProto]]:
        """During the block, collect nodes in the yielded list, for a graph inside this one that sees its values."""
        outer, self.nodes, self._known = self.nodes, [], self._known.new_child()
        try:
            yield self.nodes
        finally:
            self.nodes, self._known = outer, self._known.parents

    def constant(self, value: Any, dtype: Any = None) -> str:
        """The name of an initializer that holds `value`; equal constants share one."""
        array: NDArray[np.generic] = np.asarray(value, dtype)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            name = f"c{len(self._constants)}"
            small = _as_bytes(array)
            self.initializers.append(numpy_helper.from_array(array if small is None else small, name))
            self._constants[key] = name
            if small is not None:  # the runtime casts once, when it loads the graph
                (self._constants[key],) = self.fresh(1)
                cast = helper.make_node("Cast", [name], [self._constants[key]], to=TensorProto.FLOAT)
                self._outermost.append(cast)
        return self._constants[key]

    def value(self, argument: Any, dtype: torch.dtype | None = None) -> str:
        """An argument as an ONNX value, cast to `dtype` when given."""
        if not isinstance(argument, fx.Node):
            try:
                return self.constant(argument, NUMPY_TYPES[dtype or torch.get_default_dtype()])
            except OverflowError as error:
                raise UnsupportedOperator(
                    f"the number {argument} beside values of {dtype}, which do not hold it"
                ) from error
        name: str = self.names[argument]
        if not isinstance(argument.meta["val"], torch.Tensor):
            name = self.emit("Squeeze", [name])  # a symbolic size is kept as a vector of one element
        if dtype is None or dtype_of(argument) == dtype:
            return name
        return self.emit("Cast", [name], to=ONNX_TYPES[dtype])

    def integers(self, sizes: Sequence[Any]) -> str:
        """Sizes, some of them symbolic, as an int64 vector."""
        if not any(isinstance(size, fx.Node) for size in sizes):
            return self.constant(sizes, np.int64)
        parts = [self.names[size] if isinstance(size, fx.Node) else self.constant([size], np.int64) for size in sizes]
        return parts[0] if len(parts) == 1 else self.emit("Concat", parts, axis=0)


def value_info(name: str, value: torch.Tensor) -> onnx.ValueInfoProto:
    """A value's type and shape; its only symbol is the batch, B."""
    shape = [size if isinstance(size, int) else re.sub(r"s\d+", "B", str(size)) for size in value.shape]
    return helper.make_tensor_value_info(name, ONNX_TYPES[value.dtype], shape)


def _as_bytes(array: NDArray[np.generic]) -> NDArray[np.uint8] | None:
    """A large array of small whole float32 numbers, such as a matrix of zeros and ones, in a quarter of its bytes."""
    if array.dtype != np.float32 or array.size < LARGE:
        return None
    with np.errstate(invalid="ignore"):
        small = array.astype(np.uint8)
    return small if np.array_equal(small, array) else None


Rule = Callable[[GraphBuilder, fx.Node], Any]
"""Writes a traced operator and returns the name of its result."""


def overloads(rule: Rule, *operators: Any) -> dict[Any, Rule]:
    """One rule for several operators."""
    return dict.fromkeys(operators, rule)


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments; the operator determines their types."""
    return node.args


def argument(node: fx.Node, index: int, default: Any = None) -> Any:
    """A positional argument, or its default when the trace left it out."""
    return node.args[index] if len(node.args) > index else default


def dtype_of(node: fx.Node) -> torch.dtype:
    """The element type of a traced value; a symbolic integer is int64."""
    value = node.meta["val"]
    return value.dtype if isinstance(value, torch.Tensor) else torch.int64


def rank_of(node: fx.Node) -> int:
    """The number of axes of a traced value."""
    return int(node.meta["val"].dim())


def undivided(graph: GraphBuilder) -> None:
    """Rewrite every `Div` whose divisor is not a constant. One of integers becomes a graph that ONNX refuses."""
    constants = {constant.name for constant in graph.initializers}
    graph.nodes[:] = _rewritten(graph, graph.nodes, constants)


def _rewritten(graph: GraphBuilder, nodes: Collection[onnx.NodeProto], constants: set[str]) -> list[onnx.NodeProto]:
    written = []
    for node in nodes:
        for body in bodies_of(node):
            inner = _rewritten(graph, body.node, constants)
            del body.node[:]
            body.node.extend(inner)
        if node.op_type == "Div" and node.input[1] not in constants:
            (reciprocal,) = graph.fresh(1)
            written.append(helper.make_node("Reciprocal", [node.input[1]], [reciprocal]))
            written.append(helper.make_node("Mul", [node.input[0], reciprocal], list(node.output)))
        else:
            written.append(node)
    return written


# Loops as ONNX's `Scan`: over time, with a number of steps that the graph states, and over local steps.


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
