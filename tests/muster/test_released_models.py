"""`muster model release` and its siblings, on the store and through the admin API."""

import json
import re

import numpy as np
import pytest
import safetensors.numpy

from coordinator.errors import InvalidModel, InvalidTask, UnknownModel, UnknownRound
from coordinator.store.tasks import TaskSettings
from fedcore import checkpoint
from fedcore.bundle import Bundle
from fedcore.errors import BadRelease
from fedcore.signing import ModelRelease, SigningKey, verified
from tests.coordinator.bundles import START, evaluation_values, make_bundle, make_evaluation_bundle, report_body
from tests.coordinator.conftest import committed
from tests.coordinator.released import predicting_bundle, predicting_plan
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, check_in, put
from tests.muster.test_cli import in_process
from tests.muster.test_remote import failure, served

__all__ = ["served"]


@pytest.fixture
def key(tmp_path):
    SigningKey.new(tmp_path / "release.pem")
    return tmp_path / "release.pem"


@pytest.fixture
def plan(tmp_path):
    return predicting_bundle(tmp_path / "plan").folder


@pytest.fixture
def trained(served, plan):
    """A task that has committed a round of real reports."""
    here, _, store, devices = served
    asked = ["--plan", plan, "--population", "phones", "--goal", 2, "--rounds", 2, "--over-selection", 1, "--json"]
    task = json.loads(in_process("task", "create", *asked, *here).stdout)["task"]
    for one in assign(devices, "a", "b"):
        put(devices, one.assignment, report_body([1, 0, 0, 0], 1))
    committed(store, task, 1)
    in_process("task", "cancel", task, *here)
    return task


def evaluated(served, task, folder, means):
    """The task of an evaluation, whose devices have these means of their losses, as parts of its range 0 to 10."""
    here, _, store, devices = served
    bundle = make_evaluation_bundle(folder).folder
    asked = ["--plan", bundle, "--population", "phones", "--goal", len(means), "--over-selection", 1, "--json"]
    made = in_process("task", "create", *asked, "--evaluate", task, *here)
    assert made.exit_code == 0, made.output
    made = json.loads(made.stdout)["task"]
    # The driver looks for new tasks once a second.
    until(lambda: check_in(devices, f"{folder.name} 0").json()["outcome"] == "accepted")
    names = [f"{folder.name} {number}" for number, _ in enumerate(means)]
    for given, m in zip(assign(devices, *names), means, strict=True):
        put(devices, given.assignment, checkpoint.encode({"report": evaluation_values(m)}))
    committed(store, made, 1)
    return made


def release(task, key, *more):
    return in_process("model", "release", task, "--name", "keyboard", "--key", key, *more)


def said(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_trained_model_is_released_and_promoted_step_by_step(served, trained, key, plan, tmp_path):
    here, there, store, _ = served
    made = release(trained, key, "--share", "5%", *here)
    assert made.exit_code == 0, made.output
    (version,) = store.model_versions("phones", "keyboard")
    statement = verified(version.release, ModelRelease)
    assert version.release.signer == SigningKey.load(key).signer
    found = checkpoint.decode(store.blobs.get(statement.parameters.sha256), predicting_plan().broadcast)["params"]
    np.testing.assert_array_equal(found, np.add(START, [1, 0, 0, 0]))
    assert (statement.plan.sha256, statement.number, statement.counter) == (store.task(trained).plan_sha256, 1, 1)
    other = make_bundle(tmp_path / "other").folder
    kind, words = failure(release(trained, key, "--plan", other, *there))
    assert (kind, f"task {trained} runs another plan than the bundle {other}" in words) == (InvalidModel, True)
    facts = said(release(f"{trained}@1", key, "--plan", plan, "--json", *there))
    assert facts["origin"] == f"{trained}@1"
    assert (facts["version"], facts["population"], facts["share"]) == (2, "phones", None)
    for asked, share in (("20%", 0.2), ("0.5", 0.5), ("100%", 1.0)):
        done = said(in_process("model", "promote", "keyboard@1", "--share", asked, "--json", *there))
        assert (done["number"], done["share"]) == (1, share)
    assert said(in_process("model", "promote", "keyboard", "--share", "20%", "--json", *here))["number"] == 2
    listed = said(in_process("model", "list", "--json", *there))
    assert [(one["current"], one["share"], one["others"]) for one in listed] == [(2, 0.2, 1)]
    beta = ["--share", "100%", "--where", "ring=beta"]
    assert (
        "100 % of the devices whose ring is beta are given version 2"
        in in_process("model", "promote", "keyboard", *beta, *there).output
    )
    assert said(in_process("model", "history", "keyboard", "--json", *here))[-1]["target"] == "ring = beta"
    assert "devices whose ring is beta" in in_process("model", "show", "keyboard", *here).output
    done = said(in_process("model", "roll-back", "keyboard", "--json", *there))
    assert (done["number"], done["share"], done["kind"]) == (1, 1.0, "roll-back")
    assert "--withdraw" in failure(in_process("model", "roll-back", "keyboard", *there))[1]
    assert said(in_process("model", "roll-back", "keyboard", "--withdraw", "--json", *there))["share"] == 0
    assert failure(in_process("model", "roll-back", "keyboard", *there))[0] is InvalidModel
    numbers = [one["number"] for one in said(in_process("model", "history", "keyboard", "--json", *there))]
    assert numbers == [1, 1, 1, 1, 2, 2, 1, 1]
    for words in (["list"], ["show", "keyboard"], ["history", "keyboard"]):
        for more in ([], ["--json"]):
            shown = [in_process("model", *words, *more, *where).output for where in (here, there)]
            assert shown[0] == shown[1]
            assert "keyboard" in shown[0] or words[0] == "history"


def test_a_gate_lets_pass_what_devices_do_not_find_worse(served, trained, key, tmp_path):
    here, *_ = served
    first = evaluated(served, trained, tmp_path / "first", [0.40, 0.42, 0.44])
    same = evaluated(served, trained, tmp_path / "same", [0.38, 0.44, 0.47])
    worse = evaluated(served, trained, tmp_path / "worse", [0.60, 0.62, 0.64])
    gate = ["--gate", "loss <= previous", "--json", *here]
    shown = in_process("task", "metrics", first, *here).output
    assert re.search("round +attempt +state +reported +seconds +evaluate loss\n", shown)  # the means alone
    assert re.search(r"loss +examples +4\.2 +3\.974 to 4\.426", shown), shown
    facts = said(release(trained, key, "--evaluation", first, *gate))
    assert facts["gate"] == "no version was rolled out to all devices yet: the gate compares nothing"
    assert facts["evaluation"]["evaluate.loss"] == pytest.approx(4.2)
    assert {name.partition(".")[0] for name in facts["evaluation"]} == {"evaluate"}
    said(in_process("model", "promote", "keyboard", "--share", "100%", "--json", *here))
    facts = said(release(trained, key, "--evaluation", same, *gate))
    assert "of the previous one 4.2" in facts["gate"]
    kind, words = failure(release(trained, key, "--evaluation", worse, *gate))
    assert kind is InvalidModel
    assert "the gate refuses the version: loss of the new version is from 5.9" in words
    kind, words = failure(release(trained, key, "--evaluation", same, "--gate", "accuracy >= previous", *here))
    assert (kind, "has no evaluate.accuracy.low" in words) == (InvalidModel, True)
    assert said(in_process("model", "list", "--json", *here))[0]["versions"] == 2


def test_an_evaluation_of_another_model_is_refused(served, trained, key, tmp_path):
    here, _, store, _ = served
    made = evaluated(served, trained, tmp_path / "first", [0.4, 0.5])
    kind, words = failure(release(f"{trained}@0", key, "--evaluation", made, *here))
    assert (kind, f"evaluates the model of task {trained}, round 1, not that" in words) == (InvalidModel, True)
    kind, words = failure(release(trained, key, "--evaluation", trained, *here))
    assert (kind, "evaluates no model" in words) == (InvalidModel, True)
    kind, words = failure(release(trained, key, "--evaluation", f"{made}@7", *here))
    assert (kind, "has not committed a round 7" in words) == (UnknownRound, True)
    assert store.models() == []


def test_an_evaluation_of_the_models_file_counts(served, trained, key, tmp_path):
    here, *_ = served
    file, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    in_process("task", "checkpoint", trained, "--out", file, *here)
    safetensors.numpy.save_file({"w": 2 * START}, other)
    good, bad = (evaluated(served, one, tmp_path / one.stem, [0.4, 0.5]) for one in (file, other))
    assert said(release(trained, key, "--evaluation", good, "--json", *here))["version"] == 1
    kind, words = failure(release(trained, key, "--evaluation", bad, *here))
    assert (kind, "evaluates another file" in words) == (InvalidModel, True)


def test_a_version_can_forbid_the_older_ones(served, trained, key):
    here, *_ = served
    counters = [
        said(release(trained, key, "--json", "--share", "100%", *more, *here))["counter"]
        for more in ([], [], ["--forbid-older"], [])
    ]
    assert counters == [1, 1, 2, 2]
    assert said(in_process("model", "roll-back", "keyboard", "--json", *here))["number"] == 3
    kind, words = failure(in_process("model", "roll-back", "keyboard", *here))
    assert (kind, "version 2 has the counter 1" in words) == (InvalidModel, True)


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        (["promote", "keyboard@9", "--share", "5%"], UnknownModel, "version 9 of model 'keyboard' was not released"),
        (["promote", "keyboard", "--share", "500%"], InvalidModel, "a share of 5 of the devices cannot be"),
        (["promote", "keyboard", "--share", "5%", "--where", "a >"], InvalidModel, "on labels; column 4: here must be"),
        (["promote", "camera", "--share", "5%"], UnknownModel, "there is no model 'camera'; `muster model list`"),
        (["roll-back", "keyboard"], UnknownModel, "no version of the model was rolled out yet"),
        (["roll-back", "keyboard", "--to", "1", "--population", "far"], UnknownModel, "in population 'far'"),
    ],
)
def test_refusals_are_the_same_on_the_store_and_over_http(words, kind, told, served, trained, key):
    here, there, *_ = served
    assert release(trained, key, *here).exit_code == 0
    near, far = (failure(in_process("model", *words, *where)) for where in (here, there))
    assert near == far
    assert (near[0], told in near[1]) == (kind, True), near


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--gate", "loss <= previous"], "a gate compares figures: name the task that evaluated it"),
        (["--share", "half"], "'half' is no share: give 20% or 0.2"),
    ],
)
def test_options_that_lack_something_are_named(more, told, served, trained, key, typed):
    here, *_ = served
    code, _, err = typed("model", "release", trained, "--name", "keyboard", "--key", key, *more, *here)
    assert (code, told in err) == (2, True), err


def test_what_cannot_be_released_is_named(served, trained, key, tmp_path):
    here, _, store, _ = served
    assert failure(release(f"{trained}@last", key, *here))[0] is InvalidTask
    untrained = store.register_task(
        predicting_bundle(tmp_path / "another"), TaskSettings(population="p", goal=2, rounds=2)
    ).id
    assert "has committed no round yet" in failure(release(untrained, key, *here))[1]
    named = in_process("model", "release", trained, "--name", "Key Board", "--key", key, *here)
    assert failure(named)[0] is BadRelease
    kind, words = failure(release(trained, key, "--share", "0%", *here))
    assert (kind, "above 0 and at most 1" in words) == (InvalidModel, True)
    assert store.models() == []


def test_a_name_of_two_populations_asks_which(served, trained, key, plan, typed):
    here, _, store, _ = served
    assert release(trained, key, *here).exit_code == 0
    other = store.register_task(Bundle(plan), TaskSettings(population="tablets", goal=2, rounds=2)).id
    assert release(f"{other}@0", key, *here).exit_code == 0
    code, _, err = typed("model", "promote", "keyboard", "--share", "5%", *here)
    assert (code, "populations phones, tablets have a model 'keyboard'" in err) == (2, True)
    asked = ["model", "promote", "keyboard", "--share", "5%", "--population", "tablets", "--json", *here]
    assert said(in_process(*asked))["population"] == "tablets"
