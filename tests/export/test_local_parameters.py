"""Parameters that stay on clients, named by patterns in a model."""

import pytest
from msgspec import structs

from export.build import export_bundle
from export.errors import InvalidModel
from export.model import Model
from export.models import load
from export.verify import planned_model
from fedcore.algorithms import create
from fedcore.bundle import Bundle
from fedcore.errors import InvalidSetting, SchemaError
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, Plan
from muster import export


def local(patterns, model="mlp"):
    return Model(load(model).with_local(patterns)).schema.local


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("3.*", ("3.weight", "3.bias")),
        ("3.bias, 1.bias", ("1.bias", "3.bias")),
        ("*.bias,3.*", ("1.bias", "3.weight", "3.bias")),
        ("", ()),
    ],
)
def test_patterns_name_trained_parameters_in_their_order(patterns, names):
    assert local(patterns) == names


@pytest.mark.parametrize("pattern", ["head.*", "3", "3.*,", "3.W*"])
def test_an_unknown_pattern_is_told_what_there_is(pattern):
    with pytest.raises(InvalidModel, match=r"no trained parameter is called .*; there are 1.weight, 1.bias, 3.weight"):
        local(pattern)


def test_a_model_of_local_parameters_alone_is_refused():
    with pytest.raises(SchemaError, match=r"all parameters are local, so nothing would be shared: leave one out, of"):
        local("*")


def test_a_spec_keeps_its_own_patterns_unless_others_are_given():
    spec = load("mlp").with_local("3.*")
    assert Model(spec.with_local("")).schema.local == ("3.weight", "3.bias")
    assert Model(spec.with_local("1.*")).schema.local == ("1.weight", "1.bias")


def test_a_plan_says_which_parameters_are_local_and_others_say_nothing(tmp_path):
    bundle = export_bundle(Model(load("logreg")), create("fedavg"), tmp_path, "logreg")
    assert b"local" not in bundle.plan.encode()
    schema = Model(load("logreg").with_local("*.bias")).schema
    plan = structs.replace(bundle.plan, schema=schema)
    assert Plan.decode(plan.encode()) == plan
    data = plan.encode()
    manifest = structs.replace(bundle.manifest, plan=BlobRef.of(data))
    blobs = [data, *(blob for ref, blob in bundle.blobs() if ref != bundle.manifest.plan)]
    again = Bundle.write(tmp_path / "again", manifest, blobs)
    assert planned_model(again, "logreg").schema == schema


def test_a_plan_has_devices_keep_the_local_parameters(tmp_path):
    plan = export("mlp", "fedrep", tmp_path, local="3.*").plan
    assert plan.kept == (VectorSpec("own", sum(where.stop - where.start for where in plan.schema.local_ranges)),)


def test_an_algorithm_that_would_share_local_parameters_is_refused(tmp_path):
    with pytest.raises(InvalidSetting, match=r"fedavg shares all parameters, and of this model 3.weight, 3.bias stay"):
        export("mlp", "fedavg", tmp_path, local="3.*")
    assert not any(tmp_path.iterdir())
