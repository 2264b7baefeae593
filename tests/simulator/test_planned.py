"""Simulations of a plan: on its graphs, from its state, with its settings."""

import json
import shutil

import numpy as np
import pytest

import muster
from export.models import load as built_in
from export.verify import verify_bundle
from fedcore.bundle import Bundle
from fedcore.errors import PlanError, UntrustedAlgorithm
from fedcore.plan import BlobRef
from simulator import read_run, resume_run
from simulator.errors import DatasetError, EngineError
from simulator.planned import SimulatedPlan, completed_by_plan

SHORT = {"rounds": 2, "cohort": 3, "evaluate_every": 1, "processes": 1}
SETTINGS = {"client_lr": 0.3, "batch_size": 10}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned") / "plan"
    return muster.export("logreg", "fedadam", folder, settings=SETTINGS, seed=5, compress="rotation,subsample=0.5")


@pytest.fixture
def changed(plan, tmp_path):
    """The same bundle with other members in its manifest."""

    def change(**members):
        shutil.copytree(plan.folder, tmp_path / "changed", dirs_exist_ok=True)
        path = tmp_path / "changed" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | members))
        return Bundle(tmp_path / "changed")

    return change


@pytest.fixture
def with_blob(changed):
    """Puts a blob into the changed bundle; gives its reference, as in a manifest."""

    def put(data):
        ref = BlobRef.of(data)
        (changed().folder / "blobs" / ref.sha256).write_bytes(data)
        return {"sha256": ref.sha256, "size": ref.size}

    return put


def test_a_plan_trains_as_its_model_and_settings_do(plan):
    by_graphs = muster.simulate("logreg", plan=plan.folder, **SHORT)
    assert by_graphs.result.engine_reason == "the graphs of the plan"
    assert (by_graphs.result.algorithm, by_graphs.result.settings["batch_size"]) == ("fedadam", 10)
    same = {"settings": SETTINGS, "compress": "rotation,subsample=0.5", "engine": "torch", **SHORT}
    # The seed of a simulation draws weights too; those of the plan were drawn under 5, the cohorts here under 0.
    from_zero = muster.simulate("logreg", "digits", "fedadam", **same)
    assert not np.allclose(by_graphs.params, from_zero.params, atol=1e-3)
    alike = muster.simulate("logreg", plan=plan.folder, seed=5, **SHORT)
    by_torch = muster.simulate("logreg", "digits", "fedadam", seed=5, **same)
    np.testing.assert_allclose(alike.params, by_torch.params, atol=1e-6)


def test_a_run_on_a_plan_is_kept_and_resumed_to_the_same_bits(plan, tmp_path):
    kept = muster.simulate("logreg", plan=plan.folder, out=tmp_path / "run", **SHORT)
    assert read_run(tmp_path / "run").config.plan == plan.folder
    (tmp_path / "run" / "result.json").unlink()
    next((tmp_path / "run").glob("checkpoint-*")).unlink()
    assert resume_run(tmp_path / "run").params_sha256 == kept.result.params_sha256


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": {"client_lr": 0.2}}, "the setting client_lr is 0.3 in the plan, not 0.2; leave the option out"),
        ({"algorithm": "mimelite"}, "algorithm is 'fedadam' in .*plan, not 'mimelite'; leave the option out"),
        ({"compress": "bits=8"}, "compress is 'rotation,subsample=0.5' in .*plan, not 'bits=8'"),
        ({"engine": "torch"}, "a plan trains by its own graphs, not by the engine torch"),
        ({"baseline": "pooled"}, "a plan trains by its own graphs, not by the baseline pooled"),
        ({"device": "cuda"}, "the graphs of a plan run on the CPU, not on cuda; leave device= out"),
        ({"model": built_in("logreg", (3,), 10)}, "the model logreg has other parameters or fields than the plan in"),
    ],
)
def test_options_that_contradict_the_plan_are_named(plan, options, words):
    with pytest.raises(EngineError, match=words):
        muster.simulate(**{"model": "logreg", "plan": plan.folder, **SHORT, **options})


def test_a_data_set_that_does_not_fit_is_named(plan):
    users = muster.Population.of(["a", "b"], [{"x": np.zeros((4, 3), np.float32), "y": np.arange(4)}] * 2)
    with pytest.raises(
        DatasetError, match=r"field 'x' is float32\[3\] per example, the model reads float32\[1, 8, 8\]"
    ):
        muster.simulate("logreg", users, plan=plan.folder, **SHORT | {"cohort": 1})


def test_what_a_bundle_lacks_is_named(plan, changed, with_blob, tmp_path):
    with pytest.raises(PlanError, match=r"is not a plan bundle: it has no manifest.json"):
        muster.simulate("logreg", plan=tmp_path, **SHORT)
    lost = changed(state={"sha256": BlobRef.of(b"lost").sha256, "size": 4})
    with pytest.raises(PlanError, match="lacks blob"):
        muster.simulate("logreg", plan=lost.folder, **SHORT)
    with pytest.raises(EngineError, match="compresses reports otherwise than its manifest says"):
        SimulatedPlan(changed(compress="").folder)
    other = changed(state=with_blob(b"no safetensors" * 500))
    with pytest.raises(EngineError, match="is not one of fedadam: not a safetensors file"):
        muster.simulate("logreg", plan=other.folder, **SHORT)


def test_a_plan_takes_no_memory_for_a_model_beyond_its_state(plan, changed, with_blob):
    with pytest.raises(PlanError, match=r"the model mlp has 4,810 parameters .* holds 2,0.. numbers at most"):
        muster.simulate("mlp", plan=plan.folder, **SHORT)
    said = json.loads(plan.read(plan.manifest.plan))
    said["examples"]["fields"][-1]["high"] = 10**12
    huge = changed(plan=with_blob(json.dumps(said).encode()))
    with pytest.raises(PlanError, match="the model logreg has 65,000,000,000,000 parameters"):
        muster.simulate("logreg", plan=huge.folder, **SHORT)


def test_a_compressed_plan_is_verified(plan):
    assert verify_bundle(plan).worst < 1e-5


def test_code_of_ones_own_must_be_named(changed):
    named = changed(algorithm={"name": "theirs:Algorithm", "settings": {}})
    with pytest.raises(UntrustedAlgorithm, match="'theirs:Algorithm'; if you trust its code, name it with --algorithm"):
        completed_by_plan({"plan": named.folder})


def test_a_model_object_measures_a_plan_that_names_it(tmp_path):
    spec = built_in("logreg")
    made = muster.export(spec, "fedavg", tmp_path / "plan")
    assert muster.simulate(spec, plan=str(made.folder), **SHORT).accuracy is not None
