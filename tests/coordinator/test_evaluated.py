"""Evaluations of rounds and of released models."""

import hashlib
import itertools
import json
import uuid
from dataclasses import replace

import httpx2
import msgspec
import numpy as np
import pytest
import safetensors.numpy
from msgspec import UNSET, structs

from coordinator.commands import CountReport
from coordinator.errors import InvalidTask, UnknownRound, UnknownTask
from coordinator.keys import entry
from coordinator.rules.entities import Evaluates, ModelSource, Regularly
from coordinator.rules.states import TaskState
from coordinator.store.tasks import Secagg, TaskSettings
from fedcore import checkpoint
from fedcore.batching import is_held_out
from fedcore.checkpoint import encode, specs_of
from fedcore.params import ParamSchema, TensorSpec
from fedcore.plan import BlobRef, FrozenVectors
from fedcore.release import LineageEntry, decode_release
from fedcore.signing import verified
from muster.creating import Evaluated, released, starting_from
from tests.coordinator.bundles import (
    START,
    evaluation_values,
    make_bundle,
    make_evaluation_bundle,
    make_plan,
    make_private_bundle,
)
from tests.coordinator.conftest import LINEAGE, RELEASE
from tests.coordinator.test_privacy import promise
from tests.coordinator.test_secure import SECURE, run, seat
from tests.muster.test_cli import in_process

ONE_ROUND = TaskSettings(population="phones", goal=2, rounds=1, over_selection=1.0)


def evaluate(store, bundle, model, against=None, settings=ONE_ROUND, release=None):
    with starting_from(store, bundle, Evaluated(model, against)) as (starting, origin):
        signed = released(starting, settings, RELEASE, LINEAGE.signer) if release else None
        return store.register_task(starting, settings, signed, evaluation=origin)


def measure(desk, given, m):
    """Report that the device's own mean loss is at m of its range."""
    desk.ask(CountReport(given.assignment, uuid.uuid4().hex * 2, evaluation_values(m)))


@pytest.fixture
def trained(register, desk):
    """A task of two rounds that has committed both."""
    task = register()
    for delta in ((1, 0, 0, 0), (0, 1, 0, 0)):
        for given in desk.assign("a", "b"):
            desk.report(given, delta)
        desk.pass_time(1)
    return task


def test_a_task_evaluates_the_model_after_a_round_of_another(store, trained, tmp_path):
    bundle = make_evaluation_bundle(tmp_path / "evaluation")
    for source, number in ((f"{trained}@1", 1), (trained, 2), (f"{trained}@0", 0)):
        task = evaluate(store, bundle, source)
        params = store.checkpoint(task.id, 0)["params"]
        np.testing.assert_array_equal(params, store.checkpoint(trained, number)["params"])
        assert store.task(task.id).evaluates == Evaluates(ModelSource(task=trained, round=number))
        assert store.task(task.id).evaluates.words == f"task {trained}, round {number}"
    assert store.task(trained).evaluates is None


def test_devices_of_an_evaluation_are_sent_the_evaluated_model_alone(store, trained, desk, tmp_path):
    task = evaluate(store, make_evaluation_bundle(tmp_path / "evaluation"), f"{trained}@1")
    desk.pass_time(2)
    (given, _) = desk.assign("c", "d")
    assert given.checkpoint.sha256 == store.task(task.id).initial.checkpoint_sha256
    assert given.checkpoint == BlobRef.of(store.blobs.get(given.checkpoint.sha256))


def test_the_page_of_a_task_says_what_it_evaluates(store, register, served, tmp_path):
    trained = register()
    task = evaluate(store, make_evaluation_bundle(tmp_path / "evaluation"), trained)
    assert f"evaluates task {trained}, round 0" in httpx2.get(f"{served.admin}/tasks/{task.id}").text
    assert "evaluates" not in httpx2.get(f"{served.admin}/tasks/{trained}").text


def test_a_comparison_has_two_models_each_with_its_origin(store, trained, tmp_path):
    file = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({"w": 2 * START}, file)
    task = evaluate(store, make_evaluation_bundle(tmp_path / "compare", "compare"), f"{trained}@2", str(file))
    state = store.checkpoint(task.id, 0)
    np.testing.assert_array_equal(state["params"], store.checkpoint(trained, 2)["params"])
    np.testing.assert_array_equal(state["other"], 2 * START)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert store.task(task.id).evaluates == Evaluates(ModelSource(task=trained, round=2), ModelSource(file=digest))


def test_the_release_of_an_evaluation_names_the_evaluated_checkpoint(store, trained, tmp_path):
    settings = TaskSettings(population="phones", goal=9, rounds=1, secagg=Secagg(clip_norm=8.0))
    task = evaluate(store, make_evaluation_bundle(tmp_path / "evaluation"), trained, settings=settings, release=True)
    assert decode_release(task.release.text).checkpoint == task.initial.checkpoint_sha256
    np.testing.assert_array_equal(store.checkpoint(task.id)["params"], store.checkpoint(trained)["params"])


def test_an_evaluation_that_is_not_what_it_says_is_refused(store, trained, tmp_path):
    bundle = make_evaluation_bundle(tmp_path / "evaluation")
    origin = Evaluates(ModelSource(task=trained, round=1))
    with pytest.raises(InvalidTask, match=f"does not hold the model of task {trained}, round 1"):
        store.register_task(bundle, ONE_ROUND, evaluation=origin)


def test_sources_that_are_not_there_are_refused(store, trained, tmp_path):
    bundle = make_evaluation_bundle(tmp_path / "evaluation")
    with pytest.raises(UnknownTask, match="no task 'nope'"):
        evaluate(store, bundle, "nope")
    with pytest.raises(UnknownRound, match="7"):
        evaluate(store, bundle, f"{trained}@7")
    with pytest.raises(InvalidTask, match="names no round: give TASK, TASK@ROUND or a file"):
        evaluate(store, bundle, f"{trained}@last")


def test_files_that_are_not_such_a_model_are_refused(store, tmp_path):
    bundle, file = make_evaluation_bundle(tmp_path / "evaluation"), tmp_path / "model.safetensors"
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    for data in (b"no model", len(header).to_bytes(8, "little") + header + bytes(4)):
        file.write_bytes(data)
        with pytest.raises(InvalidTask, match="is no model as `muster task checkpoint` writes it"):
            evaluate(store, bundle, str(file))
    safetensors.numpy.save_file({"w": np.zeros(5, np.float32)}, file)
    with pytest.raises(InvalidTask, match="is not one of the bundle's plan: tensor 'w'"):
        evaluate(store, bundle, str(file))


def test_a_bundle_that_trains_evaluates_nothing(store, trained, bundle):
    with pytest.raises(InvalidTask, match="fedavg trains a model and does not evaluate one"):
        evaluate(store, bundle, trained)


def test_a_second_model_is_for_comparisons_and_they_need_one(store, trained, tmp_path):
    one, two = (make_evaluation_bundle(tmp_path / name, name) for name in ("evaluate", "compare"))
    with pytest.raises(InvalidTask, match="compare needs a second model"):
        evaluate(store, two, trained)
    with pytest.raises(InvalidTask, match="evaluate evaluates one model: leave --against out"):
        evaluate(store, one, trained, trained)
    with pytest.raises(InvalidTask, match="--against goes with --evaluate"):
        evaluate(store, two, None, trained)


def test_models_with_other_tensors_are_refused(store, trained, register, tmp_path):
    schema = ParamSchema((TensorSpec("v", (2,)), TensorSpec("b", (2,))))
    other = make_evaluation_bundle(tmp_path / "other", plan=msgspec.structs.replace(make_plan(), schema=schema))
    with pytest.raises(InvalidTask, match="is not one of the bundle's plan: tensors that the schema does not name"):
        evaluate(store, other, trained)
    blob = encode({"scale": np.ones(2, np.float32)})
    frozen = FrozenVectors(BlobRef.of(blob), specs_of({"scale": np.ones(2, np.float32)}))
    adapted = msgspec.structs.replace(make_plan(), frozen=frozen)
    task = register(make_bundle(tmp_path / "adapted", adapted, graphs=[blob]))
    with pytest.raises(InvalidTask, match=f"task {task} has other frozen tensors than the bundle's plan"):
        evaluate(store, make_evaluation_bundle(tmp_path / "evaluation"), task)


def test_a_private_model_is_evaluated_with_noise_or_not_at_all(store, register, tmp_path):
    private = register(make_private_bundle(tmp_path / "private"), rounds=9, privacy=promise())
    with pytest.raises(InvalidTask, match="evaluation of a private task without noise is refused"):
        evaluate(store, make_evaluation_bundle(tmp_path / "plain"), private)
    noisy = TaskSettings(population="phones", goal=2, rounds=1, over_selection=1.0, privacy=promise())
    task = evaluate(store, make_evaluation_bundle(tmp_path / "noisy", clip_norm=4.0), private, settings=noisy)
    assert task.evaluates.model.task == private


def test_a_private_evaluation_spends_its_own_budget_and_ends_there(store, register, desk, tmp_path):
    private = register(make_private_bundle(tmp_path / "private"), rounds=9, privacy=promise())
    settings = TaskSettings(population="phones", goal=2, rounds=9, over_selection=1.0, privacy=promise(rounds=2))
    bundle = make_evaluation_bundle(tmp_path / "noisy", clip_norm=4.0)
    task = evaluate(store, bundle, private, settings=settings)
    store.pause(private)
    for number in (1, 2):
        desk.pass_time(2)
        for given in desk.assign("a", "b"):
            measure(desk, given, 0.5)
        assert len(store.spent(task.id)) == number
    assert 3.9 < store.spent(task.id)[-1].epsilon <= 4.0
    assert store.spent(private) == []
    assert store.history(task.id)[-1].cause == "privacy-budget-spent"
    figures = [record.metrics for record in store.rounds(task.id)]
    assert all(one["evaluate.devices"] == 2 for one in figures)
    assert figures[0]["evaluate.loss.devices"] != figures[1]["evaluate.loss.devices"]  # noise is drawn anew
    np.testing.assert_array_equal(store.checkpoint(task.id)["params"], START)


def test_an_evaluation_whose_losses_jump_is_not_paused(store, trained, desk, tmp_path):
    """A task that trains would be paused as diverged after so many rounds; see test_divergence.py."""
    settings = TaskSettings(population="phones", goal=1, rounds=12, over_selection=1.0, max_loss_growth=2)
    task = evaluate(store, make_evaluation_bundle(tmp_path / "evaluation"), trained, settings=settings)
    desk.pass_time(2)
    for number in range(11):
        (given,) = desk.assign("c")
        measure(desk, given, 0.01 if number < 6 else 0.9)
        desk.pass_time(1)
    assert store.task(task.id).state is TaskState.ACTIVE
    losses = [record.metrics["evaluate.loss"] for record in store.rounds(task.id)][:11]
    assert losses == pytest.approx([0.1] * 6 + [9.0] * 5)


SHARE = 0.5
SETTINGS = TaskSettings(population="phones", over_selection=1.0, hold_out_devices=SHARE, **{**SECURE, "rounds": 3})
IDS = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(64)]
HELD_OUT, TRAINING = (
    tuple(itertools.islice((one for one in IDS if is_held_out("phones", one, SHARE) == side), 8))
    for side in (True, False)
)


@pytest.fixture
def evaluation(tmp_path):
    return make_evaluation_bundle(tmp_path / "evaluation")


@pytest.fixture
def begin(store, bundle, evaluation):
    """Start a secure training whose models are evaluated after every so many rounds."""

    def begun(every=1, release=None, settings=SETTINGS):
        regular = Regularly(every, evaluation)
        signed = release or released(bundle, settings, RELEASE, LINEAGE.signer, evaluation=regular)
        return store.register_task(bundle, settings, signed, evaluation=regular)

    return begun


def evaluations(store, task):
    return [store.task(one.task) for one in store.evaluations(task.id)]


def test_a_release_names_the_plan_that_evaluates_and_its_constants(store, begin, evaluation):
    named = decode_release(begin().release.text).evaluation
    received = checkpoint.decode(evaluation.read(evaluation.manifest.state), evaluation.plan.broadcast)
    assert (named.plan, named.bounds) == (evaluation.manifest.plan.sha256, SETTINGS.sum_bounds)
    assert set(named.constants) == {"edges", "low", "width"}
    for name, digest in named.constants.items():
        assert digest == hashlib.sha256(received[name].tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda named: UNSET, "evaluation of the release is not there, the task's is by plan"),
        (lambda named: structs.replace(named, plan="f" * 64), "evaluation of the release is by plan ffffffffffff…"),
        (lambda named: structs.replace(named, constants={}), r"constants \[\], the task's is"),
        (lambda named: structs.replace(named, bounds=structs.replace(named.bounds, clip_norm=9.0)), "clip_norm=9.0"),
    ],
)
def test_a_release_of_another_evaluation_makes_no_task(store, bundle, begin, evaluation, change, words):
    good = decode_release(begin().release.text)
    other = RELEASE.sign_statement(structs.replace(good, evaluation=change(good.evaluation)))
    with pytest.raises(InvalidTask, match=f"{words}.*: sign it again"):
        begin(release=other)
    with pytest.raises(InvalidTask, match="the task's is not there: sign it again"):
        store.register_task(bundle, SETTINGS, RELEASE.sign_statement(good))


def test_held_out_devices_are_shown_the_release_and_the_models_entry(store, desk, begin):
    task = begin(every=2)
    shown = []
    for _ in range(3):
        devices = seat(desk, TRAINING)
        shown.append(devices[0].given)
        run(devices)
    [made] = evaluations(store, task)
    (given, *_) = desk.assign(*HELD_OUT)
    shown_entry = verified(given.lineage, LineageEntry)
    assert (given.task, given.round, given.release) == (made.id, 1, task.release)
    assert (given.lineage, given.lineage.signer) == (shown[2].lineage, LINEAGE.signer)
    assert (shown_entry.release, shown_entry.round, shown_entry.checkpoint) == (
        task.release.digest,
        2,
        shown[2].checkpoint.sha256,
    )
    vectors = store.checkpoint(made.id, 0)
    assert shown_entry.params == checkpoint.digest(vectors["params"])
    np.testing.assert_array_equal(vectors["params"], store.checkpoint(task.id, 2)["params"])
    assert verified(shown[1].lineage, LineageEntry).params is UNSET  # of a round whose model is not evaluated
    constants = {name: checkpoint.digest(vector) for name, vector in vectors.items() if name != "params"}
    assert constants == decode_release(task.release.text).evaluation.constants
    assert store.releases() == [task.release]


def test_the_round_of_an_evaluation_adds_nothing_to_the_lineage(store, desk, begin):
    task = begin(settings=replace(SETTINGS, rounds=1))
    run(seat(desk, TRAINING))
    [made] = evaluations(store, task)
    after = made.initial.checkpoint_sha256
    assert entry(LINEAGE, made, made.initial, after) is None
    assert verified(entry(LINEAGE, task, task.initial, after), LineageEntry).checkpoint == after


def test_commands_release_a_training_with_its_evaluation(store, database, tmp_path, bundle, evaluation):
    where = ["--db", database, "--blobs", tmp_path / "blobs"]
    words = ["--plan", bundle.folder, "--population", "phones", "--goal", 8, "--rounds", 3, "--secagg"]
    words += ["--hold-out-devices", SHARE, "--evaluate-every", 1, "--evaluation", evaluation.folder, *where]
    file, key = tmp_path / "release.json", tmp_path / "release.pem"
    assert in_process("key", "new", "--out", key).exit_code == 0
    made = in_process("task", "release", *words, "--release-key", key, "--out", file, "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["evaluation"] == evaluation.manifest.plan.sha256
    created = in_process("task", "create", *words, "--release", file, "--json")
    assert created.exit_code == 0, created.output
    assert json.loads(created.stdout)["release"]["evaluation"] == evaluation.manifest.plan.sha256
    logged = in_process("plan", "log", *where).stdout
    assert evaluation.manifest.plan.sha256[:12] in logged
    file.write_text("{}")
    refused = in_process("task", "create", *words, "--release", file)
    assert "release.json holds no release: write it with `muster task release --out`" in str(refused.exception)
