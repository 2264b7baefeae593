"""Secure trainings whose models are evaluated under one release: what it names, and what held-out devices are shown."""

import hashlib
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec import UNSET, structs

from coordinator.errors import InvalidTask
from coordinator.keys import entry
from coordinator.rules.entities import Regularly
from coordinator.store.tasks import TaskSettings
from fedcore import checkpoint
from fedcore.hold_out import is_held_out
from fedcore.release import LineageEntry, decode_release
from fedcore.signing import verified
from muster.releasing import released
from tests.coordinator.bundles import make_evaluation_bundle
from tests.coordinator.conftest import LINEAGE, RELEASE
from tests.coordinator.test_secure import SECURE, run, seat
from tests.muster.test_cli import in_process

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
