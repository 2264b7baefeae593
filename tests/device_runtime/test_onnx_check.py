"""What an ONNX graph may be on a device: refused before ONNX Runtime sees it, and found out by the walk alone."""

import random
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from device_runtime.backends import onnxruntime
from device_runtime.backends.onnxruntime import LOOP, OPERATORS, OnnxRuntime, check_graph
from device_runtime.errors import PlanRefused
from device_runtime.session import run_session
from fedcore.plan import PREDICT
from fedcore.wire.messages import Abort
from tests.device_runtime import divisions, linear

FLOAT = TensorProto.FLOAT
VALUES = [helper.make_tensor_value_info(name, FLOAT, [2]) for name in ("c", "d")]


TWO_STEPS = numpy_helper.from_array(np.zeros(2, np.uint8), "steps")
STEP = helper.make_tensor_value_info("step", TensorProto.UINT8, [])
UNBOUNDED = "the turns of a Scan have no bound: its last input must be the mask of a graph of many steps, or an"


def model(nodes, constants=(), domains=("",), **more):
    graph = helper.make_graph(nodes, "g", VALUES[:1], VALUES[1:], constants)
    opsets = [helper.make_opsetid(domain, 18) for domain in domains]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def endless(trips=2**62):
    """A loop of so many trips: a few hundred bytes that a runtime would be busy with for ages."""
    add = helper.make_node("Add", ["v", "v"], ["w"])
    going = [helper.make_node("Identity", ["go"], ["on"]), add]
    some = [("i", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("v", FLOAT, [2])]
    ends = [("on", TensorProto.BOOL, []), ("w", FLOAT, [2])]
    body = helper.make_graph(
        going,
        "b",
        [helper.make_tensor_value_info(*one) for one in some],
        [helper.make_tensor_value_info(*one) for one in ends],
    )
    constants = [numpy_helper.from_array(np.array(trips), "trips"), numpy_helper.from_array(np.array(True), "yes")]
    return model([helper.make_node("Loop", ["trips", "yes", "c"], ["d"], body=body)], constants)


def named(name):
    """A graph whose input has that name, as bytes that need not be text."""
    data = model([helper.make_node("Identity", ["c"], ["d"])]).SerializeToString()
    return data.replace(b"\n\x01c", b"\n\x01" + name)


def branching():
    inner = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["e"])], "b", [], [helper.make_tensor_value_info("e", FLOAT, [2])]
    )
    yes = numpy_helper.from_array(np.array(True), "yes")
    return model([helper.make_node("If", ["yes"], ["d"], then_branch=inner, else_branch=inner)], [yes])


def with_function():
    function = helper.make_function(
        "", "Relu", ["x"], ["y"], [helper.make_node("Neg", ["x"], ["y"])], [helper.make_opsetid("", 18)]
    )
    return model([helper.make_node("Relu", ["c"], ["d"])], functions=[function])


def outside():
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="diary.txt")
    return model([helper.make_node("Add", ["c", "w"], ["d"])], [tensor])


def texts():
    return model(
        [helper.make_node("Identity", ["c"], ["d"])], [helper.make_tensor("w", TensorProto.STRING, [1], [b"x"])]
    )


def importing(*opsets):
    changed = model([helper.make_node("Identity", ["c"], ["d"])])
    del changed.opset_import[:]
    changed.opset_import.extend(opsets)
    return changed


def running_sum(*inner, steps=TWO_STEPS, more=(), held=()):
    """A loop over two rows whose body adds, and holds these nodes and constants too.

    steps: the initializer that bounds its turns. more: nodes before the loop.
    """
    body = helper.make_graph(
        [*inner, helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Identity", ["t"], ["y"])],
        "b",
        [*(helper.make_tensor_value_info(name, FLOAT, []) for name in ("s", "x")), STEP],
        [helper.make_tensor_value_info(name, FLOAT, []) for name in ("t", "y")],
        held,
    )
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    loop = helper.make_node("Scan", ["zero", "c", "steps"], ["sum", "d"], body=body, num_scan_inputs=2)
    return model([*more, loop], [zero, steps])


def going_over(scanned):
    """A loop of three inputs that says that it goes over so many of them."""
    graph = running_sum()
    (count,) = [one for one in graph.graph.node[0].attribute if one.name == "num_scan_inputs"]
    count.i = scanned
    return graph


def over_rows_of(name, given=(), made=(), **more):
    """A loop whose last value is called so: an input of the graph, unless it is given or made otherwise."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"])],
        "b",
        [helper.make_tensor_value_info(one, FLOAT, [2]) for one in ("s", "x")],
        [helper.make_tensor_value_info("t", FLOAT, [2])],
    )
    loop = helper.make_node("Scan", ["c", name], ["d"], body=body, num_scan_inputs=1, **more)
    rows = [] if given or made else [helper.make_tensor_value_info(name, FLOAT, ["S", 2])]
    graph = helper.make_graph([*made, loop], "g", [VALUES[0], *rows], VALUES[1:], given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def bytes_of_steps(*shape, given=0):
    """The initializer of a loop's steps, of any shape, with so many bytes."""
    return TensorProto(name="steps", data_type=TensorProto.UINT8, dims=shape, raw_data=bytes(given))


def over_nothing():
    """A loop over 2^40 rows of no bytes: days of work."""
    many = TensorProto(name="many", data_type=FLOAT, dims=[2**40, 0])
    body = helper.make_graph(
        [helper.make_node("Identity", ["s"], ["t"])],
        "b",
        [helper.make_tensor_value_info(name, FLOAT, None) for name in ("s", "x")],
        [helper.make_tensor_value_info("t", FLOAT, [2])],
    )
    return model([helper.make_node("Scan", ["c", "many"], ["d"], body=body, num_scan_inputs=1)], [many])


REFUSED = {
    "Loop": (endless(), "operator 'Loop'"),
    "If": (branching(), "operator 'If'"),
    "a body under the name of another operator": (
        model([helper.make_node("Relu", ["c"], ["d"], body=running_sum().graph)]),
        "operator 'Scan' is none",
    ),
    "Scan inside Scan": (running_sum(*running_sum().graph.node), "operator 'Scan' is none|attribute has a field 6"),
    "Loop inside Scan": (running_sum(*endless().graph.node), "operator 'Loop' is none|attribute has a field 6"),
    "a graph two deep": (
        running_sum(helper.make_node("Relu", ["x"], ["z"], body=endless().graph)),
        "its body's attribute has a field 6",
    ),
    "another domain inside Scan": (
        running_sum(helper.make_node("Relu", ["x"], ["z"], domain="com.microsoft")),
        "body's node.domain is 'com.microsoft'",
    ),
    "an operator of another domain": (
        model([helper.make_node("Relu", ["c"], ["d"], domain="com.microsoft")], domains=("",)),
        "node.domain is 'com.microsoft'",
    ),
    "another domain": (model([helper.make_node("Relu", ["c"], ["d"])], domains=("", "a.b")), "opset.domain is 'a.b'"),
    "no opset": (importing(), "one opset with one version, not 0 with 0"),
    "an opset without a version": (importing(onnx.OperatorSetIdProto(domain="")), "one opset .*, not 1 with 0"),
    "two opsets": (importing(*[helper.make_opsetid("", 18)] * 2), "one opset with one version, not 2 with 2"),
    "a function of its own": (with_function(), "its model has a field 25"),
    "external data": (outside(), "its tensor has a field 1[34]"),
    "Scan over rows of no bytes": (over_nothing(), UNBOUNDED),
    "Scan over steps that the graph does not hold": (running_sum(steps=bytes_of_steps(2**40)), UNBOUNDED),
    "Scan over steps of two dimensions": (running_sum(steps=bytes_of_steps(2**40, 0)), UNBOUNDED),
    "Scan over a value made at run time": (
        running_sum(more=[helper.make_node("Identity", ["c"], ["steps"])]),
        UNBOUNDED,
    ),
    "Scan over another input than the mask": (over_rows_of("rows"), UNBOUNDED),
    "Scan over a mask that the graph makes": (
        over_rows_of("mask", made=[helper.make_node("Expand", ["c", "many"], ["mask"])]),
        UNBOUNDED,
    ),
    "Scan over a mask of rows without bytes": (
        over_rows_of("mask", given=[TensorProto(name="mask", data_type=FLOAT, dims=[2**40, 0])]),
        UNBOUNDED,
    ),
    "Scan over the batches of the mask": (over_rows_of("mask", scan_input_axes=[1]), "another axis than the first"),
    "Scan over more inputs than it has": (going_over(4), "a Scan goes over 4 inputs, and has 3"),
    "Scan over less than no input": (going_over(-1), "a Scan goes over 18446744073709551615 inputs"),
    "a constant inside Scan": (running_sum(held=[TWO_STEPS]), "its body has a field 5"),
    "texts as values": (texts(), "its tensor has a field 6|data_type is 8"),
    "metadata": (model([], producer_name="p", doc_string="x"), "its model has a field 6"),
}


@pytest.mark.security("Every graph is checked against a list of operators")
@pytest.mark.security("An ONNX graph without branches, other domains and files")
@pytest.mark.parametrize("what", REFUSED)
def test_a_graph_with_more_than_plans_use_is_refused_before_it_is_loaded(what):
    graph, words = REFUSED[what]
    with pytest.raises(PlanRefused, match=f"cannot load graph 'train.steps': .*({words})"):
        OnnxRuntime().load(graph.SerializeToString(), "train.steps")


@pytest.mark.parametrize("scanned", [0, 3])
def test_a_scan_over_other_values_than_it_says_does_not_run(scanned):
    graph = going_over(scanned)
    check_graph(graph.SerializeToString(), "g")
    with pytest.raises(PlanRefused):
        OnnxRuntime().load(graph.SerializeToString()).run({"c": np.ones(2, np.float32)}, {"d": np.empty(2, np.float32)})


def test_a_scan_over_rows_runs_and_nodes_of_its_body_count(monkeypatch):
    graph, sums = running_sum().SerializeToString(), np.empty(2, np.float32)
    OnnxRuntime().load(graph).run({"c": np.array([1, 2], np.float32)}, {"d": sums})
    assert sums.tolist() == [1, 3]
    monkeypatch.setattr(onnxruntime, "MOST_NODES", 2)
    with pytest.raises(PlanRefused, match="more than 2 nodes"):
        check_graph(graph, "g")


@pytest.mark.security("An ONNX graph without branches, other domains and files")
def test_a_scan_over_the_mask_turns_as_often_as_the_device_says():
    graph, sums = over_rows_of("mask").SerializeToString(), np.empty(2, np.float32)
    with pytest.raises(PlanRefused, match=UNBOUNDED):
        OnnxRuntime().load(graph, "train.step")
    OnnxRuntime().load(graph, "train.steps").run(
        {"c": np.zeros(2, np.float32), "mask": np.ones((5, 2), np.float32)}, {"d": sums}
    )
    assert sums.tolist() == [5, 5]


@pytest.mark.parametrize("case", divisions.REFUSED)
def test_a_predict_graph_that_divides_by_data_is_refused(case):
    graph = divisions.REFUSED[case].SerializeToString()
    with pytest.raises(PlanRefused, match="graph 'predict': it divides by data"):
        OnnxRuntime().load(graph, PREDICT)
    check_graph(graph, "train.step")  # in a sandbox


@pytest.mark.parametrize("case", divisions.ALLOWED)
def test_a_predict_graph_may_divide_by_constants(case):
    OnnxRuntime().load(divisions.ALLOWED[case].SerializeToString(), PREDICT)


def test_a_damaged_predict_graph_never_divides_by_data():
    """What passes the walk has no divisor that ONNX's own parser finds to be data, 0 or -1."""
    draw, passed = random.Random(2), 0
    sources = [graph.SerializeToString() for graph in divisions.ALLOWED.values()]
    for _ in range(4_000):
        data = bytearray(draw.choice(sources))
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            check_graph(bytes(data), PREDICT)
        except PlanRefused:
            continue
        try:
            found = onnx.load_model_from_string(bytes(data)).graph
        except Exception:  # ONNX Runtime refuses what the parser of protobuf does
            continue
        constants = {tensor.name: tensor for tensor in found.initializer}
        bodies = [one.g for node in found.node for one in node.attribute if one.HasField("g")]
        for node in (*found.node, *(node for body in bodies for node in body.node)):
            if node.op_type in {"Div", "Mod"}:
                by, passed = constants[node.input[1]], passed + 1
                kind = helper.tensor_dtype_to_np_dtype(by.data_type)
                assert kind.kind == "f" or not np.isin(np.frombuffer(by.raw_data, kind), (0, -1)).any()
    assert passed > 100


def test_a_device_refuses_a_loop_and_says_so(coordinator, config):
    graphs = linear.graphs() | {"train.begin": endless().SerializeToString()}
    coordinator.offer(linear.plan(graphs), graphs, {"params": linear.PARAMS})
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")
    assert "'Loop'" in outcome.detail
    assert coordinator.aborts == [Abort("plan-refused")]


@pytest.mark.parametrize("name", [b"\xff", b"\xc3", b"\x80"])
def test_a_name_that_is_no_text_is_an_outcome_and_no_exception(coordinator, config, name):
    graphs = linear.graphs() | {"train.begin": named(name)}
    coordinator.offer(linear.plan(graphs), graphs, {"params": linear.PARAMS})
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")
    assert "not text" in outcome.detail


def test_the_specification_lists_the_operators():
    text = (Path(__file__).parents[2] / "docs" / "spec" / "plan.md").read_text()
    listed = re.search(r"the operators of an ONNX graph.*?\n\n    (.*?)\n\n", text, re.DOTALL).group(1)
    assert listed.split() == sorted(OPERATORS)


@pytest.mark.parametrize(
    ("bound", "words"), [("MOST_NODES", "more than 3 nodes"), ("MOST_FIELDS", "more than 3 fields")]
)
def test_more_than_any_plan_has_is_refused(bound, words, monkeypatch):
    graph = model([helper.make_node("Neg", ["c"], ["d"]) for _ in range(4)]).SerializeToString()
    check_graph(graph, "g")
    monkeypatch.setattr(onnxruntime, bound, 3)
    with pytest.raises(PlanRefused, match=words):
        check_graph(graph, "g")


@pytest.mark.security("Every graph is checked against a list of operators")
@pytest.mark.security("An ONNX graph without branches, other domains and files")
def test_damaged_bytes_are_refused_or_are_a_graph_of_known_operators():
    """ONNX's own parser must find nothing in what the walk lets pass that the walk would not have."""
    draw, passed = random.Random(0), 0
    models = [running_sum(), *(graph for graph, _ in REFUSED.values())]
    sources = [
        *linear.graphs().values(),
        *linear.many_steps().values(),
        *(graph.SerializeToString() for graph in models),
    ]
    for _ in range(7_000):
        data = bytearray(draw.choice(sources))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            match draw.randrange(4):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    data[at] ^= 1 << draw.randrange(8)
                case 2:
                    del data[at : at + draw.randint(1, 8)]
                case _:
                    data[at:at] = data[draw.randrange(len(data)) :][: draw.randint(1, 30)]
            data = data or bytearray(1)
        try:
            check_graph(bytes(data), "g.steps")
        except PlanRefused:
            continue
        try:
            found = onnx.load_model_from_string(bytes(data))
        except Exception:  # ONNX Runtime refuses what the parser of protobuf does
            continue
        passed += 1
        bodies = [one.g for node in found.graph.node for one in node.attribute if one.HasField("g")]
        inner = [node for body in bodies for node in body.node]
        assert {node.op_type for node in inner} <= OPERATORS | {""}
        assert {node.op_type for node in found.graph.node} <= OPERATORS | {"", LOOP}
        assert not any(node.domain for node in (*found.graph.node, *inner))
        assert not any(one.HasField("g") for node in inner for one in node.attribute)
        assert not any(one.graphs for node in (*found.graph.node, *inner) for one in node.attribute)
        vectors = {tensor.name: list(tensor.dims) for tensor in found.graph.initializer}
        bounds = {node.input[-1] for node in found.graph.node if node.op_type == LOOP}
        if "mask" in {one.name for one in found.graph.input}:
            bounds -= {"mask"} - vectors.keys()
        assert all(0 <= size <= len(data) for bound in bounds for (size,) in [vectors[bound]])
        assert not found.functions
        assert not any(tensor.external_data for tensor in found.graph.initializer)
    assert passed > 100


def test_random_bytes_never_end_the_walk_otherwise_than_by_a_refusal():
    draw = random.Random(1)
    for _ in range(3_000):
        data = draw.randbytes(draw.randint(1, 60))
        with pytest.raises(PlanRefused):
            check_graph(b"\x3a\xff" + data, "g")
        with pytest.raises(PlanRefused):
            check_graph(data + b"\x0b", "g")
