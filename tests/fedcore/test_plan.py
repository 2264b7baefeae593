import msgspec
import pytest

from fedcore.errors import DigestMismatch, PlanError
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, PassPlan, Plan, PredictPlan, TripPlan
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Loop

GRAPHS = {name: BlobRef.of(name.encode()) for name in ("train.begin", "train.step", "report")}


def make_plan():
    return Plan(
        name="tiny",
        schema=ParamSchema((TensorSpec("w", (2,)),)),
        broadcast=(VectorSpec("params", 2),),
        examples=ExampleSpec((Field("x", "float32", (3,)), Field("y", "int64", high=2))),
        passes=(PassPlan("train", Loop(batch_size=4), (VectorSpec("params", 2),), ("examples", "loss")),),
        report=ReportLayout(
            (
                Segment("delta", 2, "mean"),
                Segment("weight", 1, "sum"),
                Segment("train.metrics", 2, "sum", ("examples", "loss")),
            ),
            "uniform",
        ),
        graphs={"onnx": GRAPHS},
    )


def changed(**fields):
    return msgspec.json.encode(msgspec.json.decode(make_plan().encode()) | fields)


def test_a_plan_comes_back_as_it_was():
    plan = make_plan()
    assert Plan.decode(plan.encode()) == plan


def test_a_pass_has_a_graph_of_one_step_or_one_of_many_in_every_format():
    one, many = dict(GRAPHS), {"train.steps" if name == "train.step" else name: ref for name, ref in GRAPHS.items()}
    plan = msgspec.structs.replace(make_plan(), graphs={"onnx": many, "executorch": one})
    assert Plan.decode(plan.encode()) == plan
    with pytest.raises(PlanError, match=r"the passes need \['report', 'train.begin', 'train.steps'\]"):
        msgspec.structs.replace(plan, graphs={"onnx": one | many})


def of_two_trips(graphs=GRAPHS):
    one = make_plan()
    second = TripPlan(
        broadcast=(*one.broadcast, VectorSpec("gradient", 2)),
        passes=one.passes,
        report=one.report,
        graphs={"onnx": {name: BlobRef.of(b"second " + name.encode()) for name in graphs}},
    )
    return msgspec.structs.replace(one, second=second)


def test_a_plan_of_two_trips_comes_back_as_it_was():
    plan = of_two_trips()
    assert Plan.decode(plan.encode()) == plan


def test_rounds_take_the_trips_of_a_plan_in_turn():
    plan, one = of_two_trips(), make_plan()
    assert [one.of_round(number) for number in (1, 2, 3)] == [one] * 3
    assert [plan.of_round(number) == one for number in (1, 2, 3, 4)] == [True, False, True, False]
    assert [spec.name for spec in plan.of_round(2).broadcast] == ["params", "gradient"]
    assert plan.of_round(2).second is None
    assert plan.graph_refs == one.graph_refs | plan.of_round(2).graph_refs
    assert len(plan.graph_refs) == 6


def test_a_second_trip_without_the_graphs_of_its_passes_is_refused():
    with pytest.raises(PlanError, match="the passes need"):
        of_two_trips(("report",))


def test_trips_in_different_formats_are_refused():
    plan = of_two_trips()
    second = msgspec.structs.replace(plan.second, graphs={"executorch": plan.second.graphs["onnx"]})
    with pytest.raises(PlanError, match="both need the same formats"):
        msgspec.structs.replace(plan, second=second)


PREDICTED = {
    "inputs": ["x"],
    "outputs": [{"name": "output", "dtype": "float32", "shape": [2]}],
    "batch_size": 1,
    "graphs": {"onnx": msgspec.to_builtins(BlobRef.of(b"predict"))},
}


def test_a_plan_that_predicts_comes_back_and_training_keeps_less():
    plan, ref = Plan.decode(changed(predict=PREDICTED)), BlobRef.of(b"predict")
    assert plan.predict == PredictPlan(("x",), (Field("output", "float32", (2,)),), 1, {"onnx": ref})
    assert Plan.decode(plan.encode()) == plan
    assert plan.blob_refs == make_plan().blob_refs | {ref}
    assert plan.kept_refs("onnx") == make_plan().kept_refs("onnx")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"inputs": ["z"]}, "must read fields of the examples"),
        ({"inputs": []}, "must read fields of the examples"),
        ({"outputs": []}, "outputs with names of their own"),
        ({"outputs": PREDICTED["outputs"] * 2}, "outputs with names of their own"),
        ({"graphs": {}}, "predicts in formats"),
        ({"batch_size": 0}, "malformed plan"),
        ({"outputs": [{"name": "output", "dtype": "float64"}]}, "malformed plan"),
    ],
)
def test_a_plan_that_predicts_otherwise_than_it_may_is_refused(members, words):
    with pytest.raises(PlanError, match=words):
        Plan.decode(changed(predict=PREDICTED | members))


def test_equal_plans_give_equal_bytes():
    plan = make_plan()
    other = msgspec.structs.replace(plan, graphs={"onnx": dict(reversed(GRAPHS.items()))})
    assert other.encode() == plan.encode()


def test_a_field_that_this_version_does_not_know_is_ignored():
    assert Plan.decode(changed(colour="blue")) == make_plan()


def test_an_unknown_version_is_refused_even_when_nothing_else_can_be_read():
    with pytest.raises(PlanError, match="plan of version 2, this installation knows 1"):
        Plan.decode(b'{"version": 2, "shape_of_things": "to come"}')


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "malformed plan"),
        (b"\xff\xfe", "malformed plan"),
        (b'{"version": 1, "name": "\xff"}', "malformed plan"),
        (b"[]", "Expected `object`"),
        (b'{"x":' + b"[" * 100_000, "malformed plan: maximum recursion depth"),
        (b'{"name": "no version"}', "missing required field `version`"),
        (changed(name=5), r"Expected `str`, got `int` - at `\$.name`"),
        (changed(passes=[{"name": "train", "loop": {"batch_size": 0}, "carry": [], "metrics": []}]), "batch_size"),
        (changed(report={"segments": [], "weighting": "uniform"}), "malformed plan: segments must"),
        (changed(report={"segments": [], "weighting": "by-eye"}), "weighting"),
        (changed(schema={"tensors": [{"name": "w", "shape": []}] * 2}), "malformed plan: parameter names repeat"),
        (changed(schema={"tensors": [{"name": "w", "shape": [-1]}]}), "shape"),
        (changed(broadcast=[{"name": "params", "size": -2}]), "size"),
        (changed(examples={"fields": [{"name": "x", "dtype": "float16"}]}), "float16"),
    ],
)
def test_a_malformed_plan_is_refused_as_a_plan_and_says_where(data, message):
    with pytest.raises(PlanError, match=message):
        Plan.decode(data)


@pytest.mark.parametrize("change", [{"report": None}, {"train.extra": BlobRef.of(b"")}])
def test_graphs_that_the_passes_do_not_call_for_are_refused(change):
    graphs = {name: ref for name, ref in (GRAPHS | change).items() if ref is not None}
    with pytest.raises(PlanError, match=r"format 'onnx' has graphs .* the passes need"):
        msgspec.structs.replace(make_plan(), graphs={"onnx": graphs})


def test_a_blob_with_its_digest_passes_and_an_altered_one_is_refused():
    ref = BlobRef.of(b"weights")
    assert ref.check(b"weights") == b"weights"
    assert ref == BlobRef("9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c", 7)
    for altered in (b"Weights", b"weight", b""):
        with pytest.raises(DigestMismatch, match=rf"blob {ref.sha256[:12]}… \(7 bytes\) arrived as"):
            ref.check(altered)
