"""The state folder: its database, what is sealed, and the journal."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from device_runtime import monitor
from device_runtime.conditions import Clock, Conditions, Requirements
from device_runtime.errors import ExamplesError, KeyUnavailable, SealBroken, StateError, StateInUse, Unreachable
from device_runtime.examples import Collection, ExampleStore
from device_runtime.permission.policy import Policy
from device_runtime.protocol.transport import Transport
from device_runtime.session import run_session
from device_runtime.state import records
from device_runtime.state.database import open_database
from device_runtime.state.folder import (
    OVERHEAD_BYTES,
    BlobCache,
    KeyFile,
    PartialDownload,
    Sealer,
    device_key,
    only_session,
    secagg_key,
    write_whole,
)
from device_runtime.state.records import Journal, read_journal
from fedcore.plan import BlobRef, ExampleSpec, Field
from fedcore.wire.messages import Abort, Rejected, encode
from muster.app import app
from tests.device_runtime.coordinator import WINDOW, answer, refusal
from tests.device_runtime.test_secure import (
    TRUSTING,
    secure as secure,  # noqa: PLC0414 - a fixture
)

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


SECRET = b"what nobody else may read"
FIELDS = (Field("x", "float32", (64,)),)


class Platform:
    """A keystore that is locked until the device is; `asked` counts."""

    def __init__(self, key=bytes(32)):
        self.held, self.locked = key, False

    def key(self):
        if self.locked:
            raise KeyUnavailable("the keystore is locked")
        return self.held


def test_sealed_bytes_open_only_as_what_they_are_and_unchanged():
    sealer, other = Sealer(Platform()), Sealer(Platform(bytes([1]) * 32))
    sealed = sealer.seal("report", SECRET)
    assert SECRET not in sealed
    assert len(sealed) == len(SECRET) + OVERHEAD_BYTES
    assert sealed != sealer.seal("report", SECRET)
    assert sealer.open("report", sealed) == SECRET
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for opener, what, data in (
        (sealer, "key", sealed),
        (other, "report", sealed),
        (sealer, "report", changed),
        (sealer, "report", sealed[:5]),
    ):
        with pytest.raises(SealBroken):
            opener.open(what, data)


def test_a_key_file_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "folder" / "key"
    made = KeyFile(path).key()
    assert KeyFile(path).key() == made
    assert len(made) == 32
    assert path.stat().st_mode & 0o077 == 0
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(b"short")
    with pytest.raises(KeyUnavailable, match="5 bytes"):
        Sealer(KeyFile(path)).seal("report", SECRET)
    assert path.read_bytes() == b"short"


def test_nothing_secret_lies_in_the_clear_in_a_state_folder(coordinator, config):
    coordinator.faults["report"] = [refusal("unavailable")] * 9
    run_session(replace(config, keystore=Platform()))
    (kept,) = config.state.glob("*.report")
    sealer = Sealer(Platform())
    report = sealer.open("report of assignment a-1", kept.read_bytes())
    keys = [sealer.open(name, (config.state / name).read_bytes()) for name in ("device-key", "secagg-key")]
    lying = b"".join(path.read_bytes() for path in config.state.rglob("*") if path.is_file())
    for secret in (report[-16:], *keys, *(key.hex().encode() for key in keys)):
        assert secret not in lying
    assert not (config.state / "sealing-key").exists()
    coordinator.faults.clear()
    assert run_session(replace(config, keystore=Platform())).outcome == "reported"


def test_a_locked_keystore_ends_a_session_and_loses_nothing(coordinator, config):
    platform = Platform()
    assert run_session(replace(config, keystore=platform)).outcome == "reported"
    platform.locked = True
    before = (config.state / "device-key").read_bytes()
    outcome = run_session(replace(config, keystore=platform))
    assert (outcome.outcome, outcome.reason) == ("failed", "key-unavailable")
    assert (config.state / "device-key").read_bytes() == before
    platform.locked = False
    assert run_session(replace(config, keystore=platform)).outcome == "reported"
    assert len(coordinator.enrolments) == 1


def test_examples_are_sealed_under_the_key_of_the_application(tmp_path):
    store = ExampleStore.open(tmp_path, keystore=Platform())
    value = np.arange(64, dtype=np.float32)
    store.extend(Collection("typed", FIELDS), [{"x": value}])
    assert value.tobytes()[:32] not in store.path.read_bytes()
    spec = ExampleSpec(FIELDS, "typed")
    np.testing.assert_array_equal(store.load(spec)["x"], [value])
    with pytest.raises(ExamplesError, match="sealed under another key"):
        ExampleStore.open(tmp_path, keystore=Platform(bytes([1]) * 32)).load(spec)
    assert not list(tmp_path.glob("*.key"))


@pytest.mark.security("require_https holds for that address as for the coordinator's")
@pytest.mark.parametrize("stored", [False, True])
def test_a_device_that_insists_on_https_sends_no_byte_over_http(coordinator, config, stored):
    if stored:
        coordinator.faults["report"] = [refusal("unavailable")] * 9
        run_session(config)
        coordinator.calls.clear()
    outcome = run_session(replace(config, policy=Policy(require_https=True)))
    assert (outcome.outcome, outcome.reason) == ("not-now", "policy")
    assert "require_https" in outcome.detail
    assert coordinator.calls == []


@pytest.mark.security("require_https holds for that address as for the coordinator's")
def test_a_device_that_insists_on_https_asks_no_authority_over_http(secure, config):
    """Its coordinator is at https, and names an authority that is not."""
    policy = Policy(signers=TRUSTING.signers, require_https=True)
    reached = []

    def connect(url):
        reached.append(url)
        return Transport.to(secure.url)

    outcome = run_session(replace(config, coordinator="https://a.example", policy=policy, connect=connect))
    assert (outcome.reason, outcome.steps, secure.issued, secure.said) == ("policy", 0, [], [])
    assert f"against require_https of this device's policy: the authority is at {secure.url}" in outcome.detail
    assert reached == ["https://a.example"]


def reject(coordinator, reason="no-task", times=1):
    coordinator.faults["check-in"] += [answer(encode(Rejected(reason, WINDOW)))] * times


def test_entry_says_what_was_trained_for_whom_and_what_was_sent(coordinator, config):
    outcome = run_session(config)
    (entry,) = read_journal(config.state)
    assert (entry.coordinator, entry.population) == (coordinator.url, "phones")
    assert (entry.task, entry.round, entry.attempt, entry.assignment) == ("t-1", 2, 1, "a-1")
    assert (entry.plan, entry.plan_sha256) == ("linear", coordinator.plan.sha256)
    assert (entry.outcome, entry.reason, entry.examples, entry.steps) == ("reported", "", 10, 9)
    assert (entry.bytes_up, entry.bytes_down) == (outcome.bytes_up, outcome.bytes_down)
    assert len(entry.receipt) == 64
    assert entry.compute_s > 0
    assert entry.opened <= entry.closed


def test_sessions_without_work_and_refusals_are_in_the_journal(coordinator, config):
    coordinator.faults["check-in"] = [refusal("malformed-message", "no such thing")]
    run_session(config)
    reject(coordinator)
    run_session(config)
    first, second = read_journal(config.state)
    assert (first.outcome, first.reason, first.detail) == ("failed", "malformed-message", "no such thing")
    assert (second.outcome, second.reason) == ("rejected", "no-task")


def test_consecutive_sessions_without_work_are_one_entry(coordinator, config):
    reject(coordinator, times=3)
    sent = sum(run_session(config).bytes_up for _ in range(3))
    run_session(config)
    run_session(config)
    reject(coordinator)
    run_session(config)
    entries = read_journal(config.state)
    assert [(entry.outcome, entry.times) for entry in entries] == [
        ("rejected", 3),
        ("reported", 1),
        ("reported", 1),
        ("rejected", 1),
    ]
    assert entries[0].bytes_up == sent


def test_why_the_device_gave_up_is_there_without_what_may_quote_data(coordinator, config, examples):
    np.savez(config.examples, x=np.array([["secret"] * 3] * 10), y=examples["y"])
    outcome = run_session(config)
    (entry,) = read_journal(config.state)
    assert (entry.outcome, entry.reason) == (outcome.outcome, outcome.reason) == ("aborted", "invalid-examples")
    assert "'x'" in entry.detail
    written = b"".join(path.read_bytes() for path in config.state.rglob("*") if path.is_file())
    assert b"secret" not in written
    assert str(config.examples).encode() not in written


def test_the_journal_is_bounded_and_work_is_not_pushed_out_by_idleness(config, monkeypatch):
    monkeypatch.setattr(records, "MOST_WITH_WORK", 3)
    monkeypatch.setattr(records, "MOST_WITHOUT", 2)
    with only_session(config.state), open_database(config.state, Clock()) as database:
        made = Journal(database, Clock())
        for number in range(20):
            index, entry = made.open("c", "p")
            work = {"task": "t"} if number % 4 == 0 else {}
            made.close(index, replace_entry(entry, outcome=f"o{number}", **work))
    kept = [(entry.outcome, entry.task) for entry in read_journal(config.state)]
    assert kept == [("o8", "t"), ("o12", "t"), ("o16", "t"), ("o18", ""), ("o19", "")]


def replace_entry(entry, **changes):
    return type(entry)(**{name: getattr(entry, name) for name in entry.__struct_fields__} | changes)


def test_open_entry_is_running_with_its_session_and_interrupted_after(config):
    with only_session(config.state), open_database(config.state, Clock()) as database:
        Journal(database, Clock()).open("c", "p")
        assert [entry.outcome for entry in read_journal(config.state)] == ["running"]
    assert [entry.outcome for entry in read_journal(config.state)] == ["interrupted"]


def test_a_folder_without_a_journal_is_named_and_left_alone(tmp_path):
    with pytest.raises(StateError, match="no device has run"):
        read_journal(tmp_path)
    assert list(tmp_path.iterdir()) == []


def show(config, *options):
    result = CliRunner().invoke(app, ["device", "log", "--state", str(config.state), *options], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_people_read_the_journal_as_a_table_and_programs_as_json(coordinator, config):
    coordinator.lies = {"purpose": "It teaches\x1b[2J a model.", "target": "region = \x1b[2Jeu"}
    run_session(config)
    reject(coordinator, times=2)
    run_session(config)
    run_session(config)
    table = show(config)
    for word in (
        r"It teaches\u001b[2J a model.",
        r"for devices with region = \u001b[2Jeu",
        "reported",
        "receipt",
        "t-1 round 2",
        "linear",
        "phones",
        "10 examples",
        "rejected ×2",
        "(no-task)",
    ):
        assert word in table
    entries = json.loads(show(config, "--json"))
    assert [entry["outcome"] for entry in entries] == ["reported", "rejected"]
    assert [entry["outcome"] for entry in json.loads(show(config, "--json", "--last", "1"))] == ["rejected"]


def test_failed_condition_is_told_to_the_owner_not_the_coordinator(coordinator, config, monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_EVERY_S", 0.0)
    levels = iter([0.9, 0.9, 0.9])
    source = lambda: Conditions(battery=next(levels, 0.07))  # noqa: E731
    outcome = run_session(replace(config, conditions=source, requirements=Requirements(min_battery=0.2)))
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("aborted", "conditions", "transient")
    assert "battery 7 %" in read_journal(config.state)[0].detail
    assert coordinator.aborts == [Abort("conditions")]
