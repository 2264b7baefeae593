"""Plans and what they are made of: schedules, parameters, bundles."""

import hashlib
import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from fedcore.bundle import AlgorithmRef, Bundle, Certificate, Evidence, Footprint, Manifest, Parity
from fedcore.errors import DigestMismatch, PlanError, ScheduleError, SchemaError
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef, ExampleSpec, Field, PassPlan, Plan, PredictPlan, TripPlan
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Loop, ServerSchedule

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


def test_the_default_changes_nothing():
    schedule = ServerSchedule()
    assert {schedule.lr_scale(number, cohort) for number in (1, 7, 10**6) for cohort in (1, 900)} == {1.0}
    assert [schedule.cohort(number, 13) for number in (1, 50, 10**9)] == [13] * 3


def test_the_learning_rate_warms_up_in_even_steps():
    schedule = ServerSchedule(warmup_rounds=4)
    assert [schedule.lr_scale(number, 10) for number in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize(("scaling", "factors"), [("none", [1, 1, 1]), ("sqrt", [0.5, 1, 3]), ("linear", [0.25, 1, 9])])
def test_the_learning_rate_grows_with_the_cohort(scaling, factors):
    schedule = ServerSchedule(scaling=scaling, reference_cohort=20)
    assert [schedule.lr_scale(5, cohort) for cohort in (5, 20, 180)] == factors
    warming = ServerSchedule(scaling=scaling, reference_cohort=20, warmup_rounds=10)
    assert warming.lr_scale(5, 180) == factors[2] / 2


def test_the_cohort_doubles_every_few_rounds_up_to_a_cap():
    schedule = ServerSchedule(double_every=3, largest_cohort=70)
    assert [schedule.cohort(number, 10) for number in range(1, 14)] == [10] * 3 + [20] * 3 + [40] * 3 + [70] * 4
    assert schedule.cohort(10**15, 10) == 70
    assert schedule.cohort(100, 90) == 90


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"scaling": "sqrt"}, "scaling sqrt needs reference_cohort"),
        ({"double_every": 5}, "double_every needs largest_cohort"),
        ({"warmup_rounds": -1}, "warmup_rounds must be a whole number from 0 to .*, not -1"),
        ({"scaling": "cubic"}, "scaling must be one of none, sqrt, linear, not 'cubic'"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_name(wrong, says):
    with pytest.raises(ScheduleError, match=says):
        ServerSchedule(**wrong)


def test_a_schedule_survives_json():
    schedule = ServerSchedule(warmup_rounds=4, double_every=3, largest_cohort=70)
    assert msgspec.json.decode(msgspec.json.encode(schedule), type=ServerSchedule) == schedule


SCHEMA = ParamSchema((TensorSpec("w", (2, 3)), TensorSpec("b", (3,)), TensorSpec("scale", ())))


def tensors():
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([6, 7, 8], np.float32),
        "scale": np.array(9, np.float32),
    }


def test_the_vector_is_the_tensors_row_by_row_in_the_order_of_the_schema():
    shuffled = dict(reversed(tensors().items()))
    vector = SCHEMA.flatten(shuffled)
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(vector, np.arange(10))


def test_a_transposed_tensor_is_laid_out_by_its_values_not_by_its_memory():
    column_major = np.asfortranarray(tensors()["w"])
    np.testing.assert_array_equal(SCHEMA.flatten(tensors() | {"w": column_major}), np.arange(10))


@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5))
def test_unflatten_undoes_flatten(shapes):
    schema = ParamSchema(tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)))
    vector = np.arange(schema.size, dtype=np.float32)
    named = schema.unflatten(vector)
    assert [named[spec.name].shape for spec in schema.tensors] == shapes
    np.testing.assert_array_equal(schema.flatten(named), vector)


def test_flatten_copies():
    named = tensors()
    vector = SCHEMA.flatten(named)
    vector[:] = -1
    assert named["w"][1, 2] == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.zeros((3, 2), np.float32)}, r"tensor 'w' is float32\[3, 2\], the schema says float32\[2, 3\]"),
        ({"b": np.zeros(3)}, r"tensor 'b' is float64\[3\], the schema says float32\[3\]"),
        ({"scale": np.zeros(1, np.float32)}, r"tensor 'scale' is float32\[1\], the schema says float32\[\]"),
        ({"extra": np.zeros(1, np.float32)}, r"the schema does not name: \['extra'\]"),
    ],
)
def test_a_tensor_that_the_schema_does_not_describe_is_refused_by_name(change, message):
    with pytest.raises(SchemaError, match=message):
        SCHEMA.flatten(tensors() | change)


def test_a_missing_tensor_is_refused_by_name():
    named = tensors()
    del named["b"]
    with pytest.raises(SchemaError, match="tensor 'b' is missing"):
        SCHEMA.flatten(named)


@pytest.mark.parametrize("vector", [np.zeros(9, np.float32), np.zeros(10), np.zeros((1, 10), np.float32)])
def test_a_vector_of_another_length_or_type_is_refused(vector):
    with pytest.raises(SchemaError, match=r"the schema says float32\[10\]"):
        SCHEMA.unflatten(vector)


def test_a_repeated_name_is_refused():
    with pytest.raises(SchemaError, match=r"parameter names repeat: \['w'\]"):
        ParamSchema((TensorSpec("w", ()), TensorSpec("w", (1,))))


def test_the_digest_is_that_of_the_json_in_the_specification():
    text = (
        '[{"name":"w","shape":[2,3],"dtype":"float32"},'
        '{"name":"b","shape":[3],"dtype":"float32"},'
        '{"name":"scale","shape":[],"dtype":"float32"}]'
    )
    assert SCHEMA.digest == hashlib.sha256(text.encode()).hexdigest()


def test_another_order_of_tensors_is_another_schema():
    assert ParamSchema(SCHEMA.tensors[::-1]).digest != SCHEMA.digest


EVIDENCE = Evidence(
    runtime="onnxruntime 1.24",
    version="opset 18",
    tolerance=1e-5,
    parity=(Parity("train.step", 3, 2e-7, 1e-7), Parity("report", 1, 3e-7, 1e-7)),
    footprint=Footprint(step_cpu_ms=0.5, peak_rss_mb=60.0, graph_bytes=9000),
)
WORSE = msgspec.structs.replace(EVIDENCE, version="executorch 1.5.1", parity=(Parity("report", 3, 4e-7, 1e-7),))
CERTIFICATE = Certificate("torch", {"onnx": EVIDENCE, "executorch": WORSE})
STATE = b"state"


@pytest.fixture
def bundle(tmp_path):
    plan, certificate = make_plan().encode(), msgspec.json.encode(CERTIFICATE)
    manifest = Manifest(
        name="tiny",
        model="logreg",
        algorithm=AlgorithmRef("fedavg", {"client_lr": 0.1, "epochs": 1, "weighting": "uniform"}),
        plan=BlobRef.of(plan),
        state=BlobRef.of(STATE),
        certificate=BlobRef.of(certificate),
    )
    return Bundle.write(tmp_path / "tiny", manifest, [plan, STATE, certificate, *(name.encode() for name in GRAPHS)])


def rewrite(bundle, **fields):
    path = bundle.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_bundle_on_disk_holds_what_was_written(bundle):
    again = Bundle(bundle.folder)
    assert again.manifest == bundle.manifest
    assert again.plan == make_plan()
    assert again.certificate == CERTIFICATE
    assert again.certificate.formats["onnx"].worst == 3e-7
    assert again.certificate.worst == 4e-7
    assert again.read(again.manifest.state) == STATE


def test_its_blobs_are_each_listed_once_and_named_by_digest(bundle):
    listed = [ref.sha256 for ref, _ in bundle.blobs()]
    assert sorted(listed) == sorted(path.name for path in (bundle.folder / "blobs").iterdir())


def test_a_folder_without_a_manifest_is_not_a_bundle(tmp_path):
    with pytest.raises(PlanError, match=r"is not a plan bundle: it has no manifest\.json"):
        Bundle(tmp_path)


def test_a_manifest_of_an_unknown_version_is_refused(bundle):
    rewrite(bundle, version=2)
    with pytest.raises(PlanError, match="manifest of version 2, this installation knows 1"):
        Bundle(bundle.folder)


def test_a_field_of_a_manifest_that_is_not_known_is_ignored(bundle):
    rewrite(bundle, colour="blue")
    assert Bundle(bundle.folder).manifest == bundle.manifest


def test_a_malformed_manifest_is_refused_and_says_where(bundle):
    rewrite(bundle, plan="somewhere")
    with pytest.raises(PlanError, match=r"malformed manifest: .*\$\.plan"):
        Bundle(bundle.folder)


@pytest.mark.security("Everything that is fetched is checked against its size and SHA-256")
def test_an_altered_blob_is_refused_wherever_it_is_read(bundle):
    (bundle.folder / "blobs" / bundle.manifest.plan.sha256).write_bytes(make_plan().encode() + b" ")
    for read in (lambda: bundle.plan, lambda: bundle.read(bundle.manifest.plan), lambda: list(bundle.blobs())):
        with pytest.raises(DigestMismatch):
            read()


def test_a_missing_blob_is_named(bundle):
    (bundle.folder / "blobs" / GRAPHS["report"].sha256).unlink()
    with pytest.raises(PlanError, match=f"lacks blob {GRAPHS['report'].sha256[:12]}"):
        list(bundle.blobs())


def test_a_malformed_certificate_is_refused(bundle):
    for text in (b"{}", b"\xff"):
        ref = BlobRef.of(text)
        (bundle.folder / "blobs" / ref.sha256).write_bytes(text)
        rewrite(bundle, certificate={"sha256": ref.sha256, "size": ref.size})
        with pytest.raises(PlanError, match="malformed certificate"):
            Bundle(bundle.folder).certificate  # noqa: B018 - reading it is the act under test


def test_a_manifest_is_not_written_before_its_blobs_are_there(tmp_path, bundle):
    with pytest.raises(DigestMismatch, match=r"the manifest names blob .*, which was not given"):
        Bundle.write(tmp_path / "other", bundle.manifest, [STATE])
    assert not (tmp_path / "other" / "manifest.json").exists()


def test_a_bundle_that_is_written_over_another_leaves_nothing_of_it(tmp_path, bundle):
    folder, old = bundle.folder, {path.name for path in (bundle.folder / "blobs").iterdir()}
    (folder / "notes.txt").write_text("not ours")
    blobs = [
        msgspec.structs.replace(make_plan(), name="other").encode(),
        b"another state",
        bundle.read(bundle.manifest.certificate),
    ]
    refs = [BlobRef.of(blob) for blob in blobs]
    manifest = msgspec.structs.replace(bundle.manifest, plan=refs[0], state=refs[1])
    Bundle.write(folder, manifest, blobs)
    assert {path.name for path in (folder / "blobs").iterdir()} == {ref.sha256 for ref in refs}
    assert len(old) > len(refs)
    assert (folder / "notes.txt").exists()


def test_files_that_are_no_part_of_a_bundle_stay_where_one_is_written(tmp_path, bundle):
    (tmp_path / "new" / "blobs").mkdir(parents=True)
    (tmp_path / "new" / "blobs" / "mine").write_text("mine")
    Bundle.write(tmp_path / "new", bundle.manifest, [blob for _, blob in bundle.blobs()])
    assert (tmp_path / "new" / "blobs" / "mine").exists()
