"""A simplified graph as the exported program that ExecuTorch saves, and the kernels that it may use.

Delegated operators that do not wait for a plain operator share a delegate. So the graph has levels: one delegate, and
the plain operators that read it and precede the next.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects._ops import ops
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram, ExportGraphSignature, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.utils._pytree import tree_structure

from export.errors import UnsupportedOperator
from export.executorch.simplify import arguments, aten, shape_of
from export.executorch.xnnpack import Subgraph, delegable
from export.layers import layer_of

# The ExecuTorch kernels that may run, by overloads of traced operators. Each was compared with torch over several steps
# (tests/export/test_executorch.py). Left out as wrong or absent: max_pool2d_with_indices_backward, the gradient of
# average pooling, convolution_backward, remainder of negative integers. Left out as slow: convolution, addmm.
KERNELS = {
    "default": (
        "_to_copy abs acos amax amin argmax argmin asin atan as_strided_copy bitwise_not cat clamp constant_pad_nd "
        "cos cumsum embedding erf expand expm1 flip floor_divide full gather index_put log1p logical_and "
        "logical_not logical_or permute repeat round scatter_add sign sin view"
    ),
    "Tensor": "add bitwise_and bitwise_or div eq ge gt le lt mul ne slice sub",
    "Scalar": "eq ge gt le lt ne pow",
    "Tensor_Scalar": "pow",
    "Tensor_Tensor": "pow",
    "src": "scatter",
    "value": "scatter",
    "dim_IntList": "sum",
    "self": "where",
}
COPIES = {"expand": "expand_copy", "permute": "permute_copy", "slice": "slice_copy", "view": "view_copy"}
"""Kernels that copy what torch only views."""


# ExecuTorch's checks hold for operators that its own lowering makes; and tensors have no order of axes but C's.
UNCHECKED = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)


def serialize(graph: fx.Graph, ports: dict[str, list[str]]) -> bytes:
    """The bytes of a program with a graph that `simplify` made, and the names of its inputs and outputs.

    Raises UnsupportedOperator.
    """
    names = torch.tensor(list(json.dumps(ports).encode()), dtype=torch.uint8)
    manager = EdgeProgramManager({"forward": _write(graph)}, {"ports": names}, UNCHECKED)
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    data: bytes = manager.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning)).buffer
    return data


def _write(graph: fx.Graph) -> ExportedProgram:
    delegated, levels = _levels(graph)
    program = _Program(graph)
    for level in sorted(set(levels.values())):
        nodes = [node for node, at in levels.items() if at == level]
        program.delegate([node for node in nodes if node in delegated])
        for node in nodes:
            if node not in delegated:
                program.plain(node)
    return program.finish(arguments(graph.output_node())[0])


def _levels(graph: fx.Graph) -> tuple[set[fx.Node], dict[fx.Node, int]]:
    """The delegated operators, and the level of each operator.

    A view costs nothing outside delegates and little inside, so it goes where its source is.
    """
    delegated: set[fx.Node] = set()
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            if delegable(node) and (node.target is not aten.view.default or arguments(node)[0] in delegated):
                delegated.add(node)
            sources = [source for source in node.all_input_nodes if source in levels]
            levels[node] = max((levels[each] + _waits(node, each, delegated) for each in sources), default=0)
    for node in reversed(levels):
        users = [user for user in _users(node, delegated) if user in levels]
        if users and _grows(node):
            # A result that is larger than its operands is computed when it is needed: the backward pass may be far
            # away.
            levels[node] = min(levels[user] - _waits(user, node, delegated) for user in users)
    for node in levels:
        source = node.all_input_nodes[0] if node.target is aten.view.default else node
        if (source in delegated) == (node in delegated):
            levels[node] = levels.get(source, 0)
    return delegated, levels


def _users(node: fx.Node, delegated: set[fx.Node]) -> list[fx.Node]:
    """The operators that read a value, or a view of it on the same side."""
    inside = node in delegated
    views = [user for user in node.users if user.target is aten.view.default and (user in delegated) == inside]
    return [user for each in (node, *views) for user in each.users if user not in views]


def _waits(node: fx.Node, source: fx.Node, delegated: set[fx.Node]) -> bool:
    """Whether an operator belongs to a later level than its operand."""
    return node in delegated and source not in delegated


def _grows(node: fx.Node) -> bool:
    """Whether a result takes at least the memory of its largest operand; inputs and constants are there anyway."""
    operands = [source for source in node.all_input_nodes if source.op == "call_function"]
    return all(math.prod(shape_of(node)) >= math.prod(shape_of(source)) for source in operands)


class _Program:
    """The growing program. Its nodes are contiguous in memory, whatever the strides of the traced ones."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._root = fx.Graph(), torch.nn.Module()
        self._constants: dict[str, Tensor] = {}
        self._constant_nodes: dict[Any, fx.Node] = {}
        self._made: dict[fx.Node, fx.Node] = {}
        self._delegates = 0
        self._mode = FakeTensorMode()
        for node in graph.find_nodes(op="placeholder"):
            self._made[node] = self._graph.placeholder(node.name)
            self._made[node].meta["val"] = self._fake(node.meta["val"])

    def plain(self, node: fx.Node) -> None:
        """One of ExecuTorch's own kernels."""
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        if name not in KERNELS.get(overload, "").split():
            raise UnsupportedOperator(f"operator {node.target} has no ExecuTorch form here{layer_of(node)}")
        kernel = getattr(getattr(ops.edge.aten, COPIES.get(name, name)), overload)
        target: Any = node.target
        args = [
            self._argument(node, value, str(kind.type))
            for value, kind in zip(node.args, target._schema.arguments, strict=False)
        ]
        self._made[node] = self._call(kernel, args, node.kwargs, node.meta["val"])

    def delegate(self, nodes: Sequence[fx.Node]) -> None:
        """One XNNPACK subgraph with the nodes that are used outside `nodes`, and their inputs."""
        inside = set(nodes)
        values = [node for node in nodes if node.target is not aten.view.default]
        outputs = [node for node in values if any(user not in inside for user in _users(node, inside))]
        if not outputs:
            return
        needed = set(outputs)
        for node in reversed(nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        body = [node for node in nodes if node in needed]
        sources = dict.fromkeys(source for node in body for source in node.all_input_nodes if source not in inside)
        inputs = [source for source in sources if source.op != "get_attr"]
        subgraph = Subgraph(inputs, outputs)
        for node in body:
            subgraph.write(node)
        self._call_delegate(subgraph.serialize(), inputs, outputs)
        for node in nodes:
            if node.target is aten.view.default and any(user not in inside for user in node.users):
                self._made[node] = self._viewed(self._made[arguments(node)[0]], shape_of(node))

    def finish(self, results: Sequence[fx.Node]) -> ExportedProgram:
        """The program with its outputs."""
        outputs = tuple(self._outer(node) for node in results)
        self._graph.output(outputs).meta["val"] = tuple(node.meta["val"] for node in outputs)
        return _exported(self._root, self._graph, self._constants)

    def _outer(self, node: fx.Node) -> fx.Node:
        """The node of the program for a node of the graph."""
        if node.op != "get_attr":
            return self._made[node]
        value: Tensor = node.meta["val"]
        return self._constant(value)

    def _argument(self, node: fx.Node, value: Any, kind: str) -> Any:
        """An argument of a plain operator; a number instead of a tensor becomes a constant."""
        if kind == "Tensor" and not isinstance(value, fx.Node):
            dtype = node.meta["val"].dtype
            return self._constant(torch.tensor(value, dtype=dtype if dtype != torch.bool else None))
        return fx.map_arg(value, self._outer)

    def _constant(self, value: Tensor) -> fx.Node:
        value = value.detach().contiguous()
        key = value.dtype, tuple(value.shape), value.numpy().tobytes()
        if key not in self._constant_nodes:
            name = f"constant_{len(self._constants)}"
            self._constants[name] = value
            with self._graph.inserting_after():  # before everything, as ExecuTorch wants constants
                placeholder = self._graph.placeholder(name)
            placeholder.meta["val"] = self._fake(value)
            self._constant_nodes[key] = placeholder
        return self._constant_nodes[key]

    def _fake(self, value: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        with self._mode:
            sizes = [int(size) for size in value.shape] if shape is None else list(shape)
            return torch.empty(sizes, dtype=value.dtype)

    def _call(self, target: Any, args: Sequence[Any], kwargs: Any, value: Tensor) -> fx.Node:
        call = self._graph.call_function(target, tuple(args), dict(kwargs))
        call.meta["val"] = self._fake(value)
        return call

    def _viewed(self, source: fx.Node, shape: Sequence[int]) -> fx.Node:
        if tuple(source.meta["val"].shape) == tuple(shape):
            return source
        value = self._fake(source.meta["val"], shape)
        return self._call(ops.edge.aten.view_copy.default, (source, list(shape)), {}, value)

    def _call_delegate(self, data: bytes, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        """Call a delegate. XNNPACK has no tensors without axes, so they pass as vectors of one value."""
        operands = [self._viewed(self._outer(node), shape_of(node) or (1,)) for node in inputs]
        values = [self._fake(node.meta["val"], shape_of(node) or (1,)) for node in outputs]
        stand_in = _stand_in([node.meta["val"] for node in operands], values)
        name = f"lowered_module_{self._delegates}"
        self._delegates += 1
        self._root.add_module(name, LoweredBackendModule(stand_in, "XnnpackBackend", data, []))
        module = self._graph.get_attr(name)
        call = self._graph.call_function(executorch_call_delegate, (module, *operands))
        call.meta["val"] = tuple(values)
        for index, (node, value) in enumerate(zip(outputs, values, strict=True)):
            part = self._graph.call_function(operator.getitem, (call, index))
            part.meta["val"] = value
            self._made[node] = self._viewed(part, shape_of(node))


def _stand_in(inputs: Sequence[Tensor], results: Sequence[Tensor]) -> ExportedProgram:
    """A program with the shapes of a delegate, which is all that ExecuTorch needs to know about it."""
    graph = fx.Graph()
    for index, value in enumerate(inputs):
        graph.placeholder(f"given_{index}").meta["val"] = value
    outputs = []
    for value in results:
        outputs.append(graph.call_function(ops.edge.aten.full.default, (list(value.shape), 0.0)))
        outputs[-1].meta["val"] = value
    graph.output(tuple(outputs))
    return _exported(torch.nn.Module(), graph, {})


def _exported(root: torch.nn.Module, graph: fx.Graph, constants: dict[str, Tensor]) -> ExportedProgram:
    inputs = [
        InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), node.name)
        if node.name in constants
        else InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)
        for node in graph.find_nodes(op="placeholder")
    ]
    results = arguments(graph.output_node())[0]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results]
    user_inputs = tuple(spec.arg for spec in inputs if spec.kind is InputKind.USER_INPUT)
    shape_in, shape_out = tree_structure((user_inputs, {})), tree_structure(tuple(outputs))
    signature = ModuleCallSignature([], [], shape_in, shape_out)
    return ExportedProgram(
        root=fx.GraphModule(root, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict={},
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", signature)],
        constants={**constants},
        verifiers=[EXIREdgeDialectVerifier(edge_compile_config=UNCHECKED, class_only=True)],
    )
