"""A predict graph and its weights as one plain ONNX model: an initializer for each tensor, inputs named as fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from fedcore.params import Float32, Frozen, ParamSchema
from fedcore.plan import EXAMPLE, FROZEN, PARAMS

# The graphs inside nodes of ONNX graphs, such as the bodies of loops; for callers without torch too.


def bodies_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graph inside a node, if there is one."""
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]


# A predict graph and its weights as one plain ONNX model: an initializer for each tensor, inputs named as fields.


Array = NDArray[np.generic]
PRODUCER = "muster"
# Constants in another order or shape, which are made once instead of in every run.
_FOLDED: Mapping[str, Callable[[onnx.NodeProto, Array, Array], Array]] = {
    "Reshape": lambda node, value, shape: value.reshape(*map(int, shape)),
    "Transpose": lambda node, value, _: value.transpose(*node.attribute[0].ints),
    "Unsqueeze": lambda node, value, axes: np.expand_dims(value, tuple(map(int, axes))),
}


def with_weights(
    graph: bytes, name: str, schema: ParamSchema, params_D: Float32, frozen: Mapping[str, Frozen]
) -> bytes:
    """The model of a predict graph with its parameters (D,) and frozen vectors inside, serialised.

    name: of its graph. Its inputs have the names of the fields of an example, and any batch size.
    """
    model = onnx.load_model_from_string(graph)
    weights = _Weights(model.graph)
    for spec, vector in frozen.items():
        weights.add(f"{FROZEN}.{spec}", spec, vector)
    weights.split(schema, params_D)
    weights.fold()
    weights.write(name)
    model.producer_name = PRODUCER
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


class _Weights:
    """The weights in a graph, by the names of values: as the graph reads them first, and then as it uses them."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._constants: dict[str, Array] = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
        self._tensors: dict[str, str] = {}
        """The tensor that a constant holds, in some form."""

    def add(self, value: str, tensor: str, vector: Array) -> None:
        """Give a value of the graph."""
        self._constants[value], self._tensors[value] = vector, tensor

    def split(self, schema: ParamSchema, params_D: Float32) -> None:
        """Give each tensor of the parameters, where the graph splits them; a single one is all of them."""
        parts = {spec.name: params_D[where] for spec, where in schema.slices()}
        kept = []
        for node in self._graph.node:
            if node.op_type == "Split" and node.input[0] == PARAMS and len(node.output) == len(parts):
                for value, (name, vector) in zip(node.output, parts.items(), strict=True):
                    self.add(value, name, vector)
            else:
                kept.append(node)
        _replace(self._graph.node, kept)
        self.add(PARAMS, schema.tensors[0].name if len(parts) == 1 else PARAMS, params_D)

    def fold(self) -> None:
        """Make constants of what the graph only makes of weights, and multiply by them without copies for the batch."""
        expanded: dict[str, str] = {}
        kept = []
        for node in self._graph.node:
            source = node.input[0] if node.input else ""
            known = source in self._tensors and all(name in self._constants for name in node.input)
            if known and node.op_type in _FOLDED:
                second = self._constants[node.input[1]] if len(node.input) > 1 else np.empty(0)
                value = _FOLDED[node.op_type](node, self._constants[source], second)
                self.add(node.output[0], self._tensors[source], value)
                continue
            if node.op_type == "Expand" and source in self._tensors:
                expanded[node.output[0]] = source
            if node.op_type == "MatMul" and node.input[1] in expanded and node.input[0] not in expanded:
                node.input[1] = expanded[node.input[1]]  # a product broadcasts by itself
            kept.append(node)
        _replace(self._graph.node, kept)

    def write(self, name: str) -> None:
        """Put what is used into the graph, under the names of tensors and fields."""
        graph = self._graph
        _drop_unused(graph)
        read = {value for node in all_nodes(graph) for value in node.input}
        fields = {
            item.name: item.name.removeprefix(f"{EXAMPLE}.") for item in graph.input if item.name not in self._tensors
        }
        _replace(graph.input, [item for item in graph.input if item.name in fields])
        outputs = {item.name for item in graph.output}
        taken = {*fields.values(), *outputs}
        renamed = dict(fields)
        for value, tensor in self._tensors.items():
            if value in read:
                renamed[value] = _free(tensor, taken)
        inner = {value for node in all_nodes(graph) for value in node.output} | (self._constants.keys() - self._tensors)
        inner |= {item.name for body in _bodies(graph) for item in body.input}
        for value in sorted(inner - outputs):
            if value in taken:
                renamed[value] = _free(value, taken)
        constants = [numpy_helper.from_array(np.asarray(value, order="C"), renamed.get(key, key))
                     for key, value in self._constants.items() if key in read]  # fmt: skip
        _replace(graph.initializer, constants)
        del graph.value_info[:]
        _rename(graph, renamed)
        graph.name = name


def _free(name: str, taken: set[str]) -> str:
    """The name, or one like it that nothing has; taken from now on."""
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}.{number}", number + 1
    taken.add(free)
    return free


def _bodies(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    return [body for node in graph.node for body in bodies_of(node)]


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of the bodies of its loops."""
    yield from graph.node
    for body in _bodies(graph):
        yield from body.node


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Drop nodes of which nothing reads an output."""
    needed, kept = {item.name for item in graph.output}, []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
            needed.update(value for body in bodies_of(node) for inner in body.node for value in inner.input)
    _replace(graph.node, kept[::-1])


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for node in all_nodes(graph):
        for places in (node.input, node.output):
            _replace(places, [names.get(value, value) for value in places])
    for body in (graph, *_bodies(graph)):
        for item in (*body.input, *body.output):
            item.name = names.get(item.name, item.name)


def _replace(places: object, values: object) -> None:
    """Replace the content of a repeated field of protobuf; its messages are copied."""
    kept = list(values)  # type: ignore[call-overload]
    del places[:]  # type: ignore[attr-defined]
    places.extend(kept)  # type: ignore[attr-defined]
