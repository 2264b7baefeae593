from __future__ import annotations

import math
import re

import msgspec
import numpy as np
import pytest
import sqlalchemy

from coordinator.errors import InvalidTask, TaskEnded, UnknownBlob, UnknownRound, UnknownTask, UnusableStore
from coordinator.rules.entities import LONGEST_NAME
from coordinator.rules.states import TaskState
from coordinator.store.tasks import FootprintBudget, TaskSettings, open_coordinator_store
from fedcore import errors as fedcore_errors
from fedcore.bundle import Bundle
from fedcore.params import ParamSchema, TensorSpec
from fedcore.plan import BlobRef
from fedcore.report import Segment
from fedcore.signing import SigningKey
from tests.coordinator.bundles import EVIDENCE, START, make_bundle, make_plan

pytestmark = pytest.mark.every_engine


def test_registered_task_starts_from_the_bundles_model(store, register):
    task = store.task(register())
    assert (task.state, task.name, task.bundle) == (TaskState.ACTIVE, "hand-made", "hand-made")
    assert task.settings.minimum == 2
    np.testing.assert_array_equal(store.checkpoint(task.id)["params"], START)
    assert store.tasks() == [task]
    assert store.rounds(task.id) == []


def test_several_tasks_may_have_one_name_that_people_can_read(store, register):
    longest = "ü" * LONGEST_NAME
    tasks = [store.task(register(name=longest)) for _ in range(2)]
    assert [(task.name, task.bundle) for task in tasks] == [(longest, "hand-made")] * 2
    for wrong in ("", " spring", "spring ", "one\nline", "\u202e", "x" * (LONGEST_NAME + 1)):
        with pytest.raises(InvalidTask, match="the name of a task must be 1 to 100 printable characters"):
            register(name=wrong)


def test_bundle_whose_certificate_is_its_plan_stops_no_task(register, desk, tmp_path):
    plan, made = make_plan(), make_bundle(tmp_path / "made")
    read = [made.read(ref) for ref in (made.manifest.plan, made.manifest.certificate, made.manifest.state)]
    both = msgspec.json.encode(msgspec.json.decode(read[0]) | msgspec.json.decode(read[1]))
    manifest = msgspec.structs.replace(made.manifest, plan=BlobRef.of(both), certificate=BlobRef.of(both))
    graphs = [made.read(ref) for ref in plan.blob_refs]
    register(Bundle.write(tmp_path / "both", manifest, [both, read[2], *graphs]), goal=1, population="others")
    register(goal=1)
    waiting = desk.wait("a", population="others", seconds=1e9), desk.wait("b", seconds=1e9)
    desk.live(10)
    assert [one.result(timeout=0).round for one in waiting] == [1, 1]


def test_public_blobs_are_plan_graphs_and_checkpoint_only(store, register, tmp_path):
    bundle = make_bundle(tmp_path / "adam", algorithm="fedadam")
    task = store.task(register(bundle))
    secret = {bundle.manifest.state.sha256, bundle.manifest.certificate.sha256}
    with store.database.reading() as records:
        for ref, _ in bundle.blobs():
            if ref.sha256 in secret:
                with pytest.raises(UnknownBlob):
                    records.blob(ref.sha256, public=True)
            else:
                assert records.blob(ref.sha256, public=True) == ref
        assert records.blob(task.initial.checkpoint_sha256, public=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"goal": 0}, "goal must be a whole number from 1 to"),
        ({"rounds": 0}, "rounds must be a whole number from 1"),
        *(
            ({name: most}, f"{name} must be a whole number from 1 to 2")
            for name in ("goal", "rounds", "max_attempts", "min_examples", "min_separation_rounds")
            for most in (2**31, 10**30)
        ),
        ({"minimum": 3}, "minimum must be from 1 to the goal, 2"),
        ({"minimum": 0}, "minimum must be"),
        ({"over_selection": 0.5}, "over_selection must be a number from 1"),
        ({"selection_timeout_s": math.inf}, "selection_timeout_s must be a number of seconds above 0"),
        ({"reporting_deadline_s": 0}, "reporting_deadline_s must be"),
        (
            {"reporting_deadline_s": 604_801.0},
            "reporting_deadline_s must be a number of seconds .* at most 604,800",
        ),
        ({"min_examples": 0}, "min_examples must be"),
        ({"population": ""}, "population must be"),
        ({"population": "phones/eu"}, "population must be a name without / .* part of a URL"),
        ({"population": ".."}, "population must be a name without /"),
        ({"seed": -1}, "seed must be"),
        ({"formats": ()}, "formats must be the name of one format or more"),
        ({"formats": ("onnx", "")}, "formats must be"),
    ],
)
def test_wrong_setting_is_named_with_what_it_may_be(wrong, says):
    with pytest.raises(InvalidTask, match=says):
        TaskSettings(**{"population": "phones", "goal": 2, "rounds": 1} | wrong)


@pytest.mark.every_engine
def test_the_largest_settings_are_kept(store, register):
    names = ("goal", "rounds", "max_attempts", "min_examples", "min_separation_rounds")
    task = store.task(register(seed=2**63 - 1, **dict.fromkeys(names, 2**31 - 1)))
    assert [getattr(task.settings, name) for name in names] == [2**31 - 1] * 5


@pytest.mark.parametrize("part", ["peak_rss_mb", "step_cpu_ms", "graph_bytes"])
@pytest.mark.parametrize("most", [0, -1.0, math.nan, math.inf])
def test_budget_that_is_not_a_positive_number_is_named(part, most):
    with pytest.raises(InvalidTask, match=f"{part} must be a number of \\w+ above 0, not"):
        FootprintBudget(**{part: most})


def test_formats_and_budget_are_kept(store, register, tmp_path):
    bundle = make_bundle(tmp_path / "both", plan=make_plan(formats=("onnx", "executorch")))
    budget = FootprintBudget(peak_rss_mb=64, graph_bytes=1e6)
    task = register(bundle, formats=("executorch", "onnx"), budget=budget)
    assert (store.task(task).settings.formats, store.task(task).settings.budget) == (("executorch", "onnx"), budget)
    assert store.task(register()).settings.budget == FootprintBudget()


def test_plan_that_does_not_pass_the_release_check_registers_nothing(store, register, tmp_path):
    unproven = make_bundle(tmp_path / "unproven", evidence={"executorch": EVIDENCE})
    for bundle, settings, says in [
        (make_bundle(tmp_path / "good"), {"formats": ("executorch",)}, "needs graphs in format 'executorch'"),
        (
            make_bundle(tmp_path / "large"),
            {"budget": FootprintBudget(peak_rss_mb=49)},
            "'onnx' is 50 MB, the budget 49 MB",
        ),
        (unproven, {}, "no evidence for format 'onnx'"),
    ]:
        with pytest.raises(InvalidTask, match=says):
            register(bundle, **settings)
    assert store.tasks() == []


def test_altered_blob_unknown_algorithm_or_state_register_nothing(store, register, tmp_path):
    altered = make_bundle(tmp_path / "altered")
    (altered.folder / "blobs" / altered.manifest.plan.sha256).write_bytes(b"{}")
    strange = make_bundle(tmp_path / "strange", algorithm="fedavg", settings={"no_such": 1}, state={"params": START})
    foreign = make_bundle(tmp_path / "foreign", algorithm="fedadam", state={"params": START})
    for bundle, error in [
        (altered, fedcore_errors.DigestMismatch),
        (strange, fedcore_errors.InvalidSetting),
        (foreign, InvalidTask),
    ]:
        with pytest.raises(error):
            register(bundle)
    assert store.tasks() == []


def test_signature_is_kept_and_a_bad_one_is_refused_by_name(store, register, bundle, tmp_path):
    assert store.task(register()).plan_signature is None
    signed = bundle.sign(SigningKey.new(tmp_path / "key.pem"))
    assert store.task(register(signed)).plan_signature == signed.manifest.signature
    other = make_bundle(tmp_path / "other", plan=make_plan(weighting="uniform"))
    forged = msgspec.structs.replace(other.manifest, signature=signed.manifest.signature)
    (other.folder / "manifest.json").write_bytes(msgspec.json.encode(forged))
    with pytest.raises(fedcore_errors.BadSignature, match="does not have the signature of ed25519:"):
        register(Bundle(other.folder))
    assert len(store.tasks()) == 2


def test_task_is_paused_resumed_and_cancelled_once(store, register):
    task = register()
    store.pause(task)
    with pytest.raises(TaskEnded, match="is paused"):
        store.pause(task)
    store.resume(task)
    store.cancel(task)
    assert store.task(task).state is TaskState.CANCELLED
    for operation in (store.pause, store.resume, store.cancel):
        with pytest.raises(TaskEnded, match="is cancelled"):
            operation(task)


def test_unknown_task_and_round_are_named(store, register):
    with pytest.raises(UnknownTask, match="nope"):
        store.task("nope")
    task = register()
    for ask in (lambda: store.checkpoint(task, 1), lambda: store.cohort(task, 1)):
        with pytest.raises(UnknownRound, match="round 1"):
            ask()


def test_store_that_is_not_there_is_named_and_not_made(tmp_path):
    url = f"sqlite:///{tmp_path}/typo.db"
    with pytest.raises(UnusableStore, match=re.escape(url)):
        open_coordinator_store(url, tmp_path, create=False)
    open_coordinator_store(url, tmp_path / "blobs").close()
    with pytest.raises(UnusableStore, match="typos"):
        open_coordinator_store(url, tmp_path / "typos", create=False)
    assert not (tmp_path / "typos").exists()
    open_coordinator_store(url, tmp_path / "blobs", create=False).close()


def test_row_cannot_point_at_an_unknown_blob(store, register):
    task = store.task(register())
    with pytest.raises(sqlalchemy.exc.IntegrityError), store.database.writing() as records:
        records._connection.exec_driver_sql("UPDATE tasks SET plan_sha256 = 'missing'")
    assert store.task(task.id) == task


@pytest.mark.parametrize("vector", ["params", "delta", "more"])
def test_vectors_longer_than_the_state_are_refused_before_they_are_made(store, tmp_path, vector):
    size = dict.fromkeys(("params", "delta", "more"), 4) | {vector: 10**12}
    segments = [
        Segment("delta", size["delta"], "mean"),
        Segment("weight", 1, "sum"),
        Segment("more", size["more"], "sum"),
    ]
    plan = msgspec.structs.replace(
        make_plan(segments=tuple(segments)), schema=ParamSchema((TensorSpec("w", (size["params"],)),))
    )
    with pytest.raises(InvalidTask, match=f"^'{vector}' has 1,000,000,000,000 values in the plan, and the initial"):
        store.register_task(make_bundle(tmp_path / "plan", plan), TaskSettings(population="p", goal=2, rounds=1))
