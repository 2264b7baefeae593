import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from device_runtime.errors import KeyUnavailable, StateError, StateInUse, Unreachable
from device_runtime.state.cache import BlobCache, PartialDownload
from device_runtime.state.folder import KeyFile, Sealer, device_key, only_session, secagg_key, write_whole
from fedcore.plan import BlobRef

BLOB = b"a graph"
REF = BlobRef.of(BLOB)


def public(key):
    return key.public_key().public_bytes_raw()


@pytest.mark.parametrize(("made", "name"), [(device_key, "device-key"), (secagg_key, "secagg-key")])
def test_a_key_is_made_once_and_readable_by_its_owner_alone(tmp_path, made, name):
    sealer = Sealer(KeyFile(tmp_path / "key"))
    first = made(tmp_path / "one", sealer)
    assert public(made(tmp_path / "one", sealer)) == public(first) != public(made(tmp_path / "two", sealer))
    assert (tmp_path / "one" / name).stat().st_mode & 0o077 == 0


def test_a_key_that_does_not_open_is_refused_and_stays(tmp_path):
    first = public(device_key(tmp_path, Sealer(KeyFile(tmp_path / "right"))))
    kept = (tmp_path / "device-key").read_bytes()
    with pytest.raises(KeyUnavailable, match="device-key file does not open: put back the sealing key"):
        device_key(tmp_path, Sealer(KeyFile(tmp_path / "another")))
    assert (tmp_path / "device-key").read_bytes() == kept
    assert public(device_key(tmp_path, Sealer(KeyFile(tmp_path / "right")))) == first


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"me"])
def test_a_damaged_key_is_not_taken_for_a_missing_one(tmp_path, damage):
    (tmp_path / "device-key").write_bytes(damage)
    with pytest.raises(KeyUnavailable, match="remove the file"):
        device_key(tmp_path, Sealer(KeyFile(tmp_path / "key")))
    assert (tmp_path / "device-key").read_bytes() == damage


def never(ref, partial):
    raise AssertionError("fetched although cached")


def whole(ref, partial):
    partial.append(BLOB)


def test_a_blob_is_fetched_once(tmp_path):
    assert BlobCache(tmp_path, whole).get(REF) == BLOB
    assert BlobCache(tmp_path, never).get(REF) == BLOB


def test_a_kept_blob_is_read_once(tmp_path, monkeypatch):
    BlobCache(tmp_path, whole).get(REF)
    opened, plain = [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, *given, **named: opened.append(path) or plain(path, *given, **named))
    assert BlobCache(tmp_path, never).get(REF) == BLOB
    assert opened == [tmp_path / REF.sha256]


@pytest.mark.parametrize("damage", [b"", b"a grapf", b"a graph and more"])
def test_a_corrupt_cache_entry_is_fetched_again(tmp_path, damage):
    BlobCache(tmp_path, whole).get(REF)
    (tmp_path / REF.sha256).write_bytes(damage)
    assert BlobCache(tmp_path, whole).get(REF) == BLOB
    assert BlobCache(tmp_path, never).get(REF) == BLOB


def test_what_a_killed_process_left_half_written_is_swept_away(tmp_path):
    (tmp_path / "tmp123.partial").write_bytes(b"hal")
    BlobCache(tmp_path, never)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StateError, match="disk full"):
        write_whole(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_names_of_durable_files_are_durable_too(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle)))
    write_whole(tmp_path / "one" / "file", b"data")
    KeyFile(tmp_path / "two" / "key").key()
    for folder in ("one", "two"):
        assert (tmp_path / folder).stat().st_ino in synced


def test_a_broken_download_of_a_model_outlives_that_of_another_blob(tmp_path):
    def broken(ref, partial):
        partial.append(BLOB[:3])
        raise Unreachable("gone")

    other = BlobRef.of(b"another")
    for keep, left in ((frozenset({REF.sha256}), BLOB[:3]), (frozenset(), b"")):
        with pytest.raises(Unreachable):
            BlobCache(tmp_path, broken, keep=keep).get(REF)
        BlobCache(tmp_path, lambda ref, partial: partial.append(b"another"), keep=keep).get(other)
        (tmp_path / other.sha256).unlink()
        assert PartialDownload(tmp_path / f"{REF.sha256}.download").size == len(left)
        PartialDownload(tmp_path / f"{REF.sha256}.download").clear()


def test_a_digest_that_is_no_file_name_reads_nothing(tmp_path):
    with pytest.raises(StateError):
        BlobCache(tmp_path, never).get(BlobRef("\0", 1))


def test_two_sessions_cannot_share_a_state_folder(tmp_path):
    with only_session(tmp_path), pytest.raises(StateInUse, match="a folder of its own"), only_session(tmp_path):
        pass
    with only_session(tmp_path):
        pass


def test_a_state_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="file"), only_session(tmp_path / "file"):
        pass


def test_killing_the_holder_frees_the_state_folder(tmp_path):
    code = (
        "import sys, time, pathlib; from device_runtime.state.folder import only_session\n"
        f"with only_session(pathlib.Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StateInUse), only_session(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with only_session(tmp_path):
        pass


def test_what_models_need_does_not_count_towards_the_cache(tmp_path):
    needed, other = BlobRef("a" * 64, 10**9), BlobRef("b" * 64, 7)
    assert BlobCache(tmp_path, never, keep=frozenset({needed.sha256})).counted([needed, other, other]) == 7
