from __future__ import annotations

import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import pytest
from moto.server import ThreadedMotoServer

from coordinator.errors import Unavailable, UnknownBlob, UnusableStore
from coordinator.store.blobs import Blobs
from fedcore.errors import DigestMismatch
from fedcore.plan import BlobRef

LARGE = bytes(range(256)) * 4096


@contextmanager
def s3_server(monkeypatch):
    """A bucket on an S3 server, which the environment names."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint, bucket = f"http://{host}:{port}", f"b{secrets.token_hex(4)}"
    named = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "key", "REGION": "us-east-1"}
    for name, value in (named | {"ALLOW_HTTP": "true"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        httpx2.put(f"{endpoint}/{bucket}").raise_for_status()
        yield bucket
    finally:
        server.stop()


@pytest.fixture(params=["folder", "memory", "s3"])
def address(request, tmp_path, monkeypatch):
    """Where blobs may be kept, one after the other."""
    if request.param == "s3":
        with s3_server(monkeypatch) as bucket:
            yield f"s3://{bucket}/muster"
    else:
        yield str(tmp_path / "blobs") if request.param == "folder" else "memory:///"


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
    assert blobs.delete([refs[0].sha256, refs[0].sha256]) == 2
    assert blobs.delete([]) == 0
    assert [one.name for one in blobs.stored()] == [refs[1].sha256]
    assert not blobs.has(refs[0].sha256)


def test_what_is_not_ours_is_neither_listed_nor_deleted(address, tmp_path):
    blobs = Blobs(address)
    ref = blobs.put(b"ours")
    foreign = ["muster.db", "muster.db.keys", ".hidden", f"{ref.sha256}.bak", f"deeper/{ref.sha256}", "f" * 63]
    if address.startswith("s3:"):
        endpoint, bucket = os.environ["AWS_ENDPOINT_URL"], address.split("/")[2]
        for name in foreign:
            httpx2.put(f"{endpoint}/{bucket}/muster/{name}", content=b"x").raise_for_status()
    elif not address.startswith("memory:"):
        (tmp_path / "blobs" / "deeper").mkdir()
        for name in foreign:
            (tmp_path / "blobs" / name).write_bytes(b"x")
    assert [one.name for one in blobs.stored()] == [ref.sha256]


def test_what_is_stored_again_is_new_again(tmp_path):
    blobs = Blobs(tmp_path)
    ref = blobs.put(b"uploaded before, and forgotten")
    os.utime(tmp_path / ref.sha256, (0, 0))
    blobs.put(b"uploaded before, and forgotten")
    (one,) = blobs.stored()
    assert one.written_at > time.time() - 600


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


def test_silent_object_store_is_unavailable_and_the_log_says_why(monkeypatch, caplog):
    with s3_server(monkeypatch) as bucket:
        blobs = Blobs(f"s3://{bucket}")
    digest = "0" * 64
    acts = [lambda: blobs.get(digest), lambda: blobs.put(b"x"), lambda: list(blobs.stored())]
    with ThreadPoolExecutor() as pool:  # each tries for some seconds
        failures = [future.exception() for future in [pool.submit(act) for act in acts]]
    assert [type(failure) for failure in failures] == [Unavailable] * 3
    assert "127.0.0.1" in caplog.text


def test_missing_bucket_is_named_and_is_no_missing_blob(monkeypatch):
    with s3_server(monkeypatch) as bucket:
        with pytest.raises(UnusableStore, match="NoSuchBucket"):
            Blobs("s3://another")
        blobs = Blobs(f"s3://{bucket}")
        httpx2.delete(f"{os.environ['AWS_ENDPOINT_URL']}/{bucket}").raise_for_status()
        with pytest.raises(Unavailable):
            blobs.put(b"x")


def test_a_deletion_ends_before_the_transaction_around_it_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr("coordinator.store.blobs._DELETING_S", 0.05)
    with s3_server(monkeypatch) as bucket:
        blobs = Blobs(f"s3://{bucket}")
    with pytest.raises(Unavailable) as ended:
        blobs.delete(["0" * 64])
    assert isinstance(ended.value.__cause__, TimeoutError)  # the store itself tries on for seconds, then says why
    monkeypatch.setattr("coordinator.store.blobs._DELETING_S", 0)
    folder = Blobs(tmp_path)
    names = [folder.put(bytes([number])).sha256 for number in range(3)]
    assert folder.delete(names) == 1
    assert {one.name for one in folder.stored()} == set(names[1:])


def test_address_that_is_none_is_named(tmp_path):
    for address in ("ftp://host/folder", "s3://"):
        with pytest.raises(UnusableStore, match=address):
            Blobs(address)
    with pytest.raises(UnusableStore, match="typo"):
        Blobs(tmp_path / "typo", create=False)


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Blobs(tmp_path).put(b"graph")
    assert list(tmp_path.iterdir()) == []
