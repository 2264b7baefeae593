import json

import msgspec
import pytest

from fedcore.bundle import AlgorithmRef, Bundle, Certificate, Evidence, Footprint, Manifest, Parity
from fedcore.errors import DigestMismatch, PlanError
from fedcore.plan import BlobRef
from tests.fedcore.test_plan import GRAPHS, make_plan

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


def test_a_field_that_this_version_does_not_know_is_ignored(bundle):
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
