"""Export of algorithms of two trips: graphs, certificate and verification of both."""

import dataclasses

import msgspec
import pytest

from export.build import build_plan, export_bundle
from export.errors import ParityFailed
from export.formats import FORMATS
from export.model import Model
from export.models import load
from export.parity import certify
from export.verify import verify_bundle
from fedcore.algorithms import create
from fedcore.plan import BlobRef


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
