"""Plans with noise, of two trips, and with parameters that stay on devices."""

import dataclasses
import hashlib
import math

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from torch.nn import functional

from export.build import build_plan, export_bundle, planned_model, verify_bundle
from export.errors import InvalidModel, ParityFailed
from export.model import Model
from export.models import load
from export.parity import certify
from export.predict import FORMATS
from export.rewrites import KeyedNoise
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


ROWS, PLACES = 400, 500
NOISE = np.random.default_rng(4).integers(-(2**31), 2**31, ROWS).astype(np.int32)


def mixed(noise, turn, place, rounds):
    start = int.from_bytes(hashlib.sha256(b"muster.dropout.v1 %d" % turn).digest()[:4], "little")
    x = (noise + start + place * 2654435769) % 2**32
    for _ in range(rounds):
        x = x * (2 * x + 1) % 2**32
    return x - 2**32 if x >= 2**31 else x


def uniform(noise, turn, place):
    return max(mixed(noise, turn, place, 4) / 2**32 + 0.5, 2**-32)


def test_values_are_dropped_and_drawn_as_the_specification_says():
    x = torch.ones(2, 3, 2)
    with KeyedNoise(torch.from_numpy(NOISE[:2])) as drawn:
        dropped = functional.dropout(x, 0.3)
        first, normal = torch.rand_like(x), torch.randn_like(x)
    assert drawn.turns == 4
    for row, noise in enumerate(NOISE[:2].tolist()):
        for place in range(6):
            kept = mixed(noise, 1, place, 2) >= round(0.3 * 2**32) - 2**31
            assert dropped[row].flatten()[place] == pytest.approx(kept / 0.7)
            assert first[row].flatten()[place] == pytest.approx(uniform(noise, 2, place), rel=1e-6)
            length = math.sqrt(-2 * math.log(uniform(noise, 3, place)))
            expected = length * math.cos(2 * math.pi * uniform(noise, 4, place))
            assert normal[row].flatten()[place] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("dropout", "shape"),
    [(functional.dropout1d, (5,)), (functional.dropout2d, (5, 4)), (functional.dropout3d, (2, 5, 4))],
)
def test_whole_channels_are_dropped_as_the_specification_says(dropout, shape):
    x = torch.rand(2, 6, *shape) + 1
    with KeyedNoise(torch.from_numpy(NOISE[:2])) as drawn:
        dropped = dropout(x, 0.4)
    assert drawn.turns == 1
    for row, noise in enumerate(NOISE[:2].tolist()):
        for channel in range(6):
            kept = mixed(noise, 1, channel, 2) >= round(0.4 * 2**32) - 2**31
            torch.testing.assert_close(dropped[row, channel], x[row, channel] * kept / 0.6)
    with KeyedNoise(None):
        torch.testing.assert_close(dropout(x, 0.4), x)


def test_random_numbers_are_uniform_normal_and_independent():
    x = torch.empty(ROWS, PLACES)
    with KeyedNoise(torch.from_numpy(NOISE)):
        u, v, z = torch.rand_like(x), torch.rand_like(x), torch.randn_like(x).double()
    n = x.numel()
    counts, _, _ = np.histogram2d(u.flatten(), v.flatten(), 20, [[0, 1], [0, 1]])
    assert ((counts - n / 400) ** 2 / (n / 400)).sum() < 399 + 5 * math.sqrt(2 * 399)
    moments = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}
    for power, (mean, variance) in moments.items():
        assert abs((z**power).mean() - mean) < 5 * math.sqrt(variance / n)
    for neighbours in (z[:, 1:] * z[:, :-1], z[1:] * z[:-1]):
        assert abs(neighbours.mean()) < 5 / math.sqrt(neighbours.numel())


def test_without_noise_draws_are_their_means_and_shapes_need_a_batch():
    x = torch.ones(3, 2)
    with KeyedNoise(None):
        assert torch.randn_like(x).eq(0).all()
        assert torch.rand_like(x).eq(0.5).all()
    with KeyedNoise(torch.from_numpy(NOISE)), pytest.raises(InvalidModel, match="first axis is not the batch"):
        torch.randn_like(x)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """FedDane on logistic regression: its second trip has two passes, of which one reads the other's carry."""
    return export_bundle(Model(load("logreg")), create("feddane"), tmp_path_factory.mktemp("dane"), "logreg")


def test_the_plan_has_both_trips_and_the_certificate_their_graphs(bundle):
    plan = bundle.plan
    assert [[one.name for one in trip.passes] for trip in plan.trips] == [["sweep"], ["sweep", "train"]]
    assert [[one.name for one in trip.broadcast] for trip in plan.trips] == [["params"], ["params", "gradient"]]
    assert [[one.name for one in trip.report.means] for trip in plan.trips] == [["gradient"], ["delta"]]
    evidence = bundle.certificate.formats["onnx"]
    names = ["sweep.step", "report", "second.sweep.step", "second.train.step", "second.report", "predict"]
    assert [parity.graph for parity in evidence.parity] == names
    graphs = [trip.graphs["onnx"].values() for trip in plan.trips]
    assert evidence.footprint.graph_bytes == sum(ref.size for refs in graphs for ref in refs)


def test_a_bundle_of_two_trips_is_verified_from_its_source(bundle):
    assert verify_bundle(bundle).worst <= 1e-5


def test_verification_sees_another_second_trip(bundle, tmp_path):
    plan = bundle.plan
    loop = msgspec.structs.replace(plan.second.passes[1].loop, epochs=2)
    passes = (plan.second.passes[0], msgspec.structs.replace(plan.second.passes[1], loop=loop))
    changed = msgspec.structs.replace(plan, second=msgspec.structs.replace(plan.second, passes=passes))
    with pytest.raises(ParityFailed, match="the plan's passes are not what export makes"):
        verify_bundle(with_plan(bundle, changed, tmp_path / "other"))
    with pytest.raises(ParityFailed, match="the plan's number of trips"):
        verify_bundle(with_plan(bundle, msgspec.structs.replace(plan, second=None), tmp_path / "one"))


def with_plan(bundle, plan, folder):
    blobs = [data for _, data in bundle.blobs()]
    manifest = msgspec.structs.replace(bundle.manifest, plan=BlobRef.of(plan.encode()))
    return type(bundle).write(folder, manifest, [*blobs, plan.encode()])


def test_the_certificate_catches_a_wrong_second_trip():
    model, algorithm = Model(load("logreg")), create("mime", {"optimizer": "adam"})
    wrong = dataclasses.replace(algorithm, beta1=algorithm.beta1 * 0.99)
    with pytest.raises(ParityFailed, match=r"train\.step|report"):
        certify(model, algorithm, *build_plan(model, wrong))


@pytest.mark.long
@pytest.mark.parametrize("name", ["mime", "feddane", "fsvrg", "dsvrg"])
def test_every_algorithm_of_two_trips_exports_in_both_formats(name, tmp_path, executorch):
    export_bundle(Model(load("digits_cnn")), create(name), tmp_path, targets=tuple(FORMATS))
