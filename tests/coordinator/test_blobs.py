from __future__ import annotations

import os
import secrets
import time

import httpx2
import pytest
from moto.server import ThreadedMotoServer

from coordinator.blobs import Blobs
from coordinator.errors import MissingStore, Unavailable, UnknownBlob, UnsupportedBlobs
from fedcore.errors import DigestMismatch
from fedcore.plan import BlobRef

LARGE = bytes(range(256)) * 4096


@pytest.fixture(scope="module")
def s3():
    """The endpoint of an S3 server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["folder", "memory", "s3"])
def address(request, tmp_path, monkeypatch):
    """Where blobs may be kept, one after the other."""
    if request.param == "folder":
        return str(tmp_path / "blobs")
    if request.param == "memory":
        return "memory:///"
    endpoint, bucket = request.getfixturevalue("s3"), f"b{secrets.token_hex(4)}"
    named = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "key", "REGION": "us-east-1"}
    for name, value in (named | {"ALLOW_HTTP": "true"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    httpx2.put(f"{endpoint}/{bucket}").raise_for_status()
    return f"s3://{bucket}/muster"


def test_blob_is_read_back_by_its_digest_whole_and_in_part(address):
    blobs = Blobs(address)
    ref = blobs.put(LARGE)
    assert ref == BlobRef.of(LARGE)
    assert blobs.put(LARGE) == ref
    assert blobs.get(ref.sha256) == LARGE
    assert b"".join(blobs.read(ref.sha256, range(ref.size))) == LARGE
    assert b"".join(blobs.read(ref.sha256, range(1000, 700_000))) == LARGE[1000:700_000]
    assert b"".join(blobs.read(ref.sha256, range(5, 5))) == b""
    pieces = list(blobs.read(ref.sha256, range(ref.size)))
    assert max(map(len, pieces)) < ref.size or address == "memory:///"


def test_unknown_blob_is_named_before_anything_is_read(address):
    blobs = Blobs(address)
    assert not blobs.has("0" * 64)
    for ask in (blobs.get, lambda digest: blobs.read(digest, range(1))):
        with pytest.raises(UnknownBlob, match="000000000000"):
            ask("0" * 64)


def test_everything_stored_is_listed_with_its_time_and_can_be_deleted(address):
    blobs = Blobs(address)
    refs = [blobs.put(data) for data in (b"one", b"two")]
    listed = {one.name: one.written_at for one in blobs.stored()}
    assert listed.keys() == {ref.sha256 for ref in refs}
    assert min(listed.values()) > time.time() - 600
    blobs.delete([refs[0].sha256, refs[0].sha256])
    assert [one.name for one in blobs.stored()] == [refs[1].sha256]
    assert not blobs.has(refs[0].sha256)


@pytest.mark.parametrize("name", ["../secret", "", "0" * 63, "A" * 64, "0" * 64 + "/..", "0" * 64 + "\n"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    (tmp_path / "secret").write_bytes(b"x")
    blobs = Blobs(tmp_path / "blobs")
    for ask in (blobs.get, blobs.has, lambda digest: blobs.read(digest, range(1))):
        with pytest.raises(UnknownBlob):
            ask(name)


def test_altered_blob_is_named(tmp_path):
    blobs = Blobs(tmp_path)
    ref = blobs.put(b"graph")
    assert [path.name for path in tmp_path.iterdir()] == [ref.sha256]
    (tmp_path / ref.sha256).write_bytes(b"grasp")
    with pytest.raises(DigestMismatch):
        blobs.get(ref.sha256)


def test_object_store_that_does_not_answer_is_unavailable(monkeypatch):
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:1", "ALLOW_HTTP": "true", "SKIP_SIGNATURE": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(Unavailable, match="cannot be reached"):
        Blobs("s3://bucket").get("0" * 64)


def test_address_that_is_none_is_named(tmp_path):
    for address in ("ftp://host/folder", "s3://"):
        with pytest.raises(UnsupportedBlobs, match=address):
            Blobs(address)
    with pytest.raises(MissingStore, match="typo"):
        Blobs(tmp_path / "typo", create=False)


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Blobs(tmp_path).put(b"graph")
    assert list(tmp_path.iterdir()) == []
