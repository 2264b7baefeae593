"""Files of keys are whole, durable and for their owner, whatever was left beside them."""

import os
import stat

import pytest

from fedcore.errors import NotWritten
from fedcore.private_files import write_private, write_whole
from fedcore.signing import SigningKey
from fedcore.succession import SucceedingKey

MAKERS = {"succession": lambda path: SucceedingKey.new("server").save(path), "signing": SigningKey.new}


@pytest.mark.parametrize("maker", MAKERS)
def test_the_file_of_a_key_and_its_name_are_on_the_disk(tmp_path, monkeypatch, maker):
    path, synced, fsync = tmp_path / "key", [], os.fsync

    def noted(handle):
        fsync(handle)
        synced.append((os.fstat(handle).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", noted)
    MAKERS[maker](path)
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


@pytest.mark.parametrize("maker", MAKERS)
def test_what_a_killed_process_left_keeps_nobody_from_a_key(tmp_path, maker):
    target, stale = tmp_path / "target", tmp_path / f"key.{os.getpid()}"
    target.write_text("untouched")
    stale.symlink_to(target)
    MAKERS[maker](tmp_path / "key")
    assert target.read_text() == "untouched"
    assert {one.name for one in tmp_path.iterdir()} == {"key", "target", stale.name}


def test_a_private_file_is_replaced_only_when_told(tmp_path):
    path = tmp_path / "file"
    write_private(path, b"first")
    with pytest.raises(FileExistsError) as refused:
        write_private(path, b"second")
    assert (refused.value.filename, path.read_bytes()) == (str(path), b"first")
    write_private(path, b"second", replace=True)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"second", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_for_others_is_replaced_whole_with_the_usual_mode(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"first")
    usual = path.stat().st_mode
    write_whole(path, b"second")
    assert (path.read_bytes(), path.stat().st_mode) == (b"second", usual)
    with pytest.raises(NotWritten, match=r"missing/file cannot be written: No such file or directory$"):
        write_whole(tmp_path / "missing" / "file", b"third")
    assert list(tmp_path.iterdir()) == [path]
