from __future__ import annotations

import os

import pytest

from coordinator.blobs import Blobs
from coordinator.errors import UnknownBlob
from fedcore.errors import DigestMismatch
from fedcore.plan import BlobRef


def test_blob_is_read_back_by_its_digest(tmp_path):
    blobs = Blobs(tmp_path / "blobs")
    ref = blobs.put(b"graph")
    assert ref == BlobRef.of(b"graph")
    assert blobs.put(b"graph") == ref
    assert blobs.get(ref.sha256) == b"graph"
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [ref.sha256]


@pytest.mark.parametrize("name", ["../secret", "", "0" * 63, "A" * 64, "0" * 64 + "/..", "0" * 64 + "\n"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    (tmp_path / "secret").write_bytes(b"x")
    with pytest.raises(UnknownBlob):
        Blobs(tmp_path / "blobs").get(name)


def test_unknown_and_altered_blobs_are_named(tmp_path):
    blobs = Blobs(tmp_path)
    with pytest.raises(UnknownBlob, match="000000000000"):
        blobs.get("0" * 64)
    ref = blobs.put(b"graph")
    blobs.path(ref.sha256).write_bytes(b"grasp")
    with pytest.raises(DigestMismatch):
        blobs.get(ref.sha256)


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Blobs(tmp_path).put(b"graph")
    assert list(tmp_path.iterdir()) == []
