"""Capture: an algorithm's functions, with the model's loss and gradient inside, as graphs of plain operators.

A captured graph is functional: all state in, all state out, weights never inside. The batch axis stays symbolic.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.scan import scan_op
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.func import functionalize
from torch.fx import traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)

from export.decompositions import TABLE
from export.errors import DynamicControlFlow, ExportError, InvalidModel, UnsupportedOperator, quiet, reason
from export.layers import Layers, layer_of
from export.model import Model, oracle_of
from export.rewrites import Traceable, unhinted
from export.trial_examples import fixed_batch
from export.weights import in_order
from fedcore import plan as plans
from fedcore.algorithms.algorithm import Pass, StatefulAlgorithm, Trip, Vector, with_carries
from fedcore.checkpoint import frozen_specs_of
from fedcore.params import FrozenVector, VectorSpec
from fedcore.plan import Field

# Above this many values a constant that some operator can make on the device is not worth its bytes in the graph.
LARGEST = 1 << 16


def fold_constants(module: fx.GraphModule) -> None:
    """Replace operators on constants by their results, and remove what nothing uses."""
    constants: dict[fx.Node, torch.Tensor] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            constants[node] = getattr(module, str(node.target))
        elif _foldable(node, constants):
            value = node.target(
                *fx.map_arg(node.args, constants.__getitem__), **fx.map_arg(node.kwargs, constants.__getitem__)
            )
            name = f"folded_{node.name}"
            module.register_buffer(name, value.contiguous())
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            constants[constant] = value
    module.graph.eliminate_dead_code()


def _foldable(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() <= LARGEST
        and all(source in constants for source in node.all_input_nodes)
    )


# The batch size of the example inputs. Any size above 1 will do: torch specialises on 0 and 1.
TRACE_BATCH = 7
Table = Mapping[Any, Callable[..., Any]]
"""The functions to trace instead of operators, by operator."""
# Values that a model may not change in place, by kind of input; the message names the operator and its layer.
IN_PLACE = {
    plans.CARRY: "its weights in forward by {}{}; only their gradient may: compute with a changed copy of them instead",
    plans.EXAMPLE: "its inputs in place by {}{}; work on a copy",
    plans.FROZEN: "a buffer in place by {}{}; only parameters are kept from one step to the next",
}
NO_CTC = (
    "ctc_loss, whose tables are as long as the targets in the data; take cross-entropy at every step, or write the sum "
    "over alignments in operators of fixed sizes"
)


@dataclass(frozen=True, slots=True)
class Port:
    """A named input of a graph. `batched` puts a symbolic batch axis before `shape`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    batched: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """A traced graph with its inputs and the names of its outputs, in order."""

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...]

    @property
    def placeholders(self) -> Sequence[fx.Node]:
        """The nodes that stand for the inputs."""
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def results(self) -> Sequence[fx.Node]:
        """The nodes that compute the outputs."""
        return self.module.graph.output_node().args[0]  # type: ignore[return-value]

    @property
    def specs(self) -> tuple[VectorSpec, ...]:
        """The outputs, which are flat vectors, by the last part of their names."""
        return tuple(
            VectorSpec(name.rpartition(".")[2], int(node.meta["val"].numel()))
            for name, node in zip(self.outputs, self.results, strict=True)
        )


def capture(
    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    inputs: Sequence[Port],
    batch: int | None = None,
    layers: Layers | None = None,
    table: Table = TABLE,
) -> Captured:
    """Trace `function`, which takes and returns tensors by name. Unused inputs are left out.

    batch: the fixed batch size; symbolic when None. layers: for messages. table: the forms of operators.
    Raises DynamicControlFlow when its Python depends on values or fixes the batch size.
    """
    layers = layers or Layers(nn.Identity())
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # shapes seldom repeat, and the cache would take a fifth of a trace
    names: list[str] = []

    def positional(*tensors: Tensor) -> list[Tensor]:
        results = function({port.name: tensor for port, tensor in zip(inputs, tensors, strict=True)})
        names[:] = results
        return list(results.values())

    examples = [_fake(mode, port, batch) for port in inputs]
    with _explained(layers):
        # Failures while example values are made become our own errors.
        with quiet("torch._subclasses.fake_tensor"), layers.watch(), unhinted(layers.module), Traceable(), in_order():
            module = _traced(positional, examples, table)
        module = _functional(module, examples, table, inputs)
    if environment.replacements:
        raise DynamicControlFlow(
            "the model's Python takes the batch size as a number, as a loop over its examples does; work on all of "
            "them at once, and write x.shape[0], or -1 in reshape, instead of a number"
        )
    _refuse(module)
    fold_constants(module)
    return Captured(module, _drop_unused(module, inputs), tuple(names))


def _traced(function: Callable[..., Any], examples: Sequence[Tensor], table: Table) -> fx.GraphModule:
    """The graph. No Python is written and compiled for it, which nobody runs: that takes a tenth of a trace."""
    with _use_lazy_graph_module(True):
        traced = make_fx(function, decomposition_table=table, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        return traced(*examples)


@contextlib.contextmanager
def _explained(layers: Layers) -> Iterator[None]:
    """A block that traces a model. Its errors become those of `capture`, and name the layer."""
    try:
        yield
    except ExportError as error:
        raise type(error)(f"{error}{layers.here}") from error
    except GuardOnDataDependentSymNode as error:
        raise DynamicControlFlow(
            f"the model branches on the values of a tensor; use torch.where instead{layers.here}"
        ) from error
    except DynamicOutputShapeException as error:
        words = NO_CTC if "ctc_loss" in str(error) else f"{error.func}, which gives as many values as the data decide"
        raise UnsupportedOperator(f"the model takes{layers.here} {words}") from error
    except Exception as error:  # whatever the user's own code raises
        raise InvalidModel(f"the model does not run{layers.here}: {reason(error)}") from error


def _functional(
    module: fx.GraphModule, examples: Sequence[Tensor], table: Table, inputs: Sequence[Port]
) -> fx.GraphModule:
    """The same graph without operators that change a value in place."""
    mutable = [
        node for node in module.graph.nodes if isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    ]
    if not mutable:
        return module
    kinds = [port.name.partition(".")[0] for port in inputs]
    kinds_by_input = dict(zip(module.graph.find_nodes(op="placeholder"), kinds, strict=True))
    for node in mutable:
        for index, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                changed = node.kwargs[argument.name] if index >= len(node.args) else node.args[index]
                _refuse_state(node, changed, kinds_by_input)
    run = functionalize(_Interpreter(module).run, remove="mutations")
    with traceback.preserve_node_meta():
        return _traced(run, examples, table)


class _Interpreter(fx.Interpreter):
    """Runs a graph under `functionalize`, which has to be given constants, as they are not arguments."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The constant, as a value of this run."""
        value = super().get_attr(target, args, kwargs)
        return torch.ops.aten.lift_fresh(value) if isinstance(value, Tensor) else value


def _refuse_state(node: fx.Node, changed: Any, kinds_by_input: Mapping[fx.Node, str]) -> None:
    """Refuse an operator that changes an input or a frozen weight in place. kinds_by_input: the kind of each input."""
    # A value may be another one, or a part of it, in the same memory.
    while isinstance(changed, fx.Node) and (
        changed.target is operator.getitem or (isinstance(changed.target, OpOverload) and changed.target.is_view)
    ):
        changed = changed.args[0]
    if not isinstance(changed, fx.Node):
        return
    kind = plans.FROZEN if changed.op == "get_attr" else kinds_by_input.get(changed)
    if kind is not None:
        raise InvalidModel(
            f"the model changes {IN_PLACE.get(kind, IN_PLACE[plans.CARRY])}".format(node.target, layer_of(node))
        )


def _refuse(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "get_attr":
            _refuse_constant(node, getattr(module, node.target))
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor) and free_unbacked_symbols(value):
            raise DynamicControlFlow(
                f"{node.target}{layer_of(node)} gives as many values as the data decide; use torch.where instead"
            )
        if isinstance(value, Tensor) and value.dtype in {torch.float16, torch.bfloat16}:
            raise UnsupportedOperator(
                f"{node.target}{layer_of(node)} computes in {value.dtype}; devices train in float32, so leave out "
                "half(), bfloat16() and autocast"
            )
        if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise UnsupportedOperator(
                f"{node.target}{layer_of(node)} draws random numbers, which every runtime would draw otherwise; only "
                "nn.Dropout, Dropout1d to Dropout3d, randn_like and rand_like draw the same everywhere"
            )


def _refuse_constant(node: fx.Node, value: Any) -> None:
    """Refuse a graph's constant that is a function (control flow) or a parameter, which must be an input."""
    if isinstance(value, fx.GraphModule) and all(user.target is scan_op for user in node.users):
        return  # the loop of an LSTM layer
    if not isinstance(value, Tensor):
        raise DynamicControlFlow(
            f"the model branches or loops by an operator of torch{layer_of(node)}; use torch.where, or a Python loop"
        )
    if value.requires_grad:
        raise InvalidModel(
            f"the model computes with a parameter that is not one of its layers'{layer_of(node)}; register it in the "
            "module, as nn.Parameter in an attribute or in nn.ParameterList is"
        )


def _drop_unused(module: fx.GraphModule, inputs: Sequence[Port]) -> tuple[Port, ...]:
    used = []
    for node, port in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if node.users:
            used.append(port)
        else:
            module.graph.erase_node(node)
    module.recompile()
    return tuple(used)


def vector_ports(prefix: str, specs: Sequence[VectorSpec]) -> list[Port]:
    """Ports `prefix.<name>` for flat vectors."""
    coded = {spec.name for spec in specs if isinstance(spec, FrozenVector) and spec.dtype == "uint8"}
    return [
        Port(f"{prefix}.{spec.name}", (spec.size,), torch.uint8 if spec.name in coded else torch.float32)
        for spec in specs
    ]


@dataclass(frozen=True, slots=True)
class Received:
    """The inputs of a pass from before it: vectors received and kept, and the last carries of earlier passes."""

    broadcast: Sequence[VectorSpec]
    carries: Mapping[str, Sequence[VectorSpec]]
    kept: Sequence[VectorSpec] = ()

    @property
    def ports(self) -> list[Port]:
        """The graph inputs for them."""
        ports = vector_ports(plans.BROADCAST, self.broadcast) + vector_ports(plans.KEPT, self.kept)
        for name, specs in self.carries.items():
            ports += vector_ports(plans.final_carry(name), specs)
        return ports

    def last(self, values: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The carries among the values of a graph's inputs."""
        return {name: plans.unprefixed(plans.final_carry(name), values) for name in self.carries}

    def of(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All of them, as a pass reads them."""
        return with_carries(self.before(values), self.last(values))

    @staticmethod
    def before(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The broadcast and what the device keeps, as `report` reads them."""
        return plans.unprefixed(plans.BROADCAST, values) | plans.unprefixed(plans.KEPT, values)


def capture_begin(algorithm_pass: Pass, received: Received) -> Captured:
    """Graph `<pass>.begin`: received vectors in, first carry out."""
    return capture(lambda values: plans.prefixed(plans.NEXT, algorithm_pass.begin(received.of(values))), received.ports)


def capture_step(
    model: Model,
    algorithm_pass: Pass,
    received: Received,
    carry: Sequence[VectorSpec],
    batch: int | None = None,
    table: Table = TABLE,
) -> Captured:
    """Graph `<pass>.step`: carry, received and frozen vectors, one batch, its mask and noise in; next carry and metric
    sums out. That of a forward pass is of the model in eval mode.

    batch: the batch size if it is fixed. table: the forms of operators.
    """

    model = model.evaluating() if algorithm_pass.forward else model

    def step(values: dict[str, Tensor]) -> dict[str, Tensor]:
        bound, fields = (
            model.with_frozen(plans.unprefixed(plans.FROZEN, values)),
            plans.unprefixed(plans.EXAMPLE, values),
        )
        oracle = oracle_of(algorithm_pass, bound, fields, values[plans.MASK], values[plans.NOISE])
        after = algorithm_pass.step(plans.unprefixed(plans.CARRY, values), received.of(values), oracle)
        return plans.prefixed(plans.NEXT, after) | {plans.METRICS: oracle.sums}

    ports = (
        vector_ports(plans.CARRY, carry)
        + received.ports
        + vector_ports(plans.FROZEN, frozen_specs_of(model.frozen_vectors))
    )
    ports += [example_port(field) for field in model.spec.fields]
    ports += [Port(plans.MASK, (), batched=True), Port(plans.NOISE, (), torch.int32, batched=True)]
    layers = Layers(model.module)
    try:
        return capture(step, ports, batch, layers, table)
    except (InvalidModel, DynamicControlFlow) as error:
        fixed = "" if isinstance(error.__cause__, ExportError) else fixed_batch(model)
        raise (DynamicControlFlow(f"{fixed}{layers.here}") if fixed else error) from error.__cause__


def capture_report(trip: Trip, received: Received) -> Captured:
    """Graph `report`: broadcast and the last carry of every pass in, the averaged segments out."""

    def report(values: dict[str, Tensor]) -> dict[str, Vector]:
        return trip.report(received.before(values), received.last(values))

    return capture(report, received.ports)


def capture_first(algorithm: StatefulAlgorithm, received: Received) -> Captured:
    """Graph `kept.first`: the first model that a device receives in, what it keeps before its first round out."""
    return capture(
        lambda values: plans.prefixed(plans.NEXT, algorithm.init_client(received.before(values)[plans.PARAMS])),
        received.ports,
    )


def capture_next(algorithm: StatefulAlgorithm, received: Received) -> Captured:
    """Graph `kept.next`: the inputs of the report in, what the device keeps from then on out."""
    return capture(
        lambda values: plans.prefixed(plans.NEXT, algorithm.keep(received.before(values), received.last(values))),
        received.ports,
    )


def _fake(mode: FakeTensorMode, port: Port, batch: int | None) -> Tensor:
    shape = (batch or TRACE_BATCH, *port.shape) if port.batched else port.shape
    symbolic = port.batched and batch is None
    dynamic = [DimDynamic.DUCK if symbolic and axis == 0 else DimDynamic.STATIC for axis in range(len(shape))]
    return mode.from_tensor(
        torch.zeros(shape, dtype=port.dtype), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic)
    )


def example_port(field: Field) -> Port:
    """The port `example.<field>`, with a batch axis."""
    return Port(f"{plans.EXAMPLE}.{field.name}", field.shape, getattr(torch, field.dtype), batched=True)
