"""The coordinator's own keys: the server's, which signs invitations to secure rounds, and the lineage key.

Each is in a file, the same at all replicas, and never in the database, so that its copies do not hold it. The store has
the public keys: a process with another does not start. Who pinned an earlier key of the server, the store or a device,
follows the succession to the one that holds now. The lineage key has no successor: releases name it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import UNSET, UnsetType

from coordinator.errors import KeysDamaged, KeysDiffer, KeysMissing
from coordinator.rules.alerts import STORE, Action
from coordinator.rules.entities import Snapshot, Task
from coordinator.store.database import Database
from coordinator.store.records.records import Records
from fedcore.errors import BrokenSuccession, InvalidKey
from fedcore.release import LineageEntry, LogProof, Signed, TreeHead, decode_release
from fedcore.signing import SigningKey, SucceedingKey, short
from secagg.keys import Tree

_LOG = logging.getLogger(__name__)
_SECRET_BYTES = 32


class Keys:
    """The server's key. Any thread may read it, and one calls `hold`. path: its file."""

    def __init__(self, server: SucceedingKey, path: Path | None = None) -> None:
        self.server = server
        self._path = path

    @classmethod
    def load(cls, path: Path) -> Keys:
        """The key in its file. Raises KeysMissing or KeysDamaged."""
        return cls(_load(path), path)

    @classmethod
    def open(cls, path: Path, database: Database) -> Keys:
        """The key in its file, which is made at the first start on a store, and its public key in the store.

        When the store has an earlier key than the file, it follows the succession. Raises KeysMissing, KeysDamaged, or
        KeysDiffer when the file holds another key than the store knows: devices pinned that.
        """
        with database.reading() as records:
            stored = records.identity.get("server")
        if stored is None:
            with contextlib.suppress(FileExistsError):
                SucceedingKey.new("server").save(path)
        keys = cls.load(path)
        _record(keys.server, path, database)
        return keys

    def hold(self, stored: str | None) -> bool:
        """Whether the server's key is the one that the store knows; read again from its file if it was succeeded."""
        if stored is None or self.server.public.hex() == stored:
            return True
        with contextlib.suppress(KeysMissing, KeysDamaged):
            key = _load(self._path) if self._path else self.server
            if key.public.hex() == stored:
                _LOG.warning("the server's key %s succeeds %s", short(key.public), short(self.server.public))
                self.server = key
                return True
        return False

    @property
    def between_replicas(self) -> bytes:
        """A secret derived from the server's key: it authenticates requests that replicas forward to each other."""
        return self._derived(b"muster: requests passed on between replicas")

    @property
    def of_web_sessions(self) -> bytes:
        """A secret derived from the server's key: it authenticates the cookies and forms of the dashboard."""
        return self._derived(b"muster: web sessions of the dashboard")

    @property
    def of_returns(self) -> bytes:
        """A secret derived from the server's key: it authenticates the times that devices carry (`return_tokens`)."""
        return self._derived(b"muster: times at which devices come back")

    @property
    def of_assignments(self) -> bytes:
        """A secret derived from the server's key: it authenticates the ids of assignments (`assignment_ids`)."""
        return self._derived(b"muster: ids of assignments")

    def _derived(self, info: bytes) -> bytes:
        return _derive(self.server.private.private_bytes_raw(), info)


@functools.lru_cache(16)  # every report needs one
def _derive(private: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), _SECRET_BYTES, salt=None, info=info).derive(private)


def rotate(path: Path, database: Database, out: Path | None = None) -> Keys:
    """Replace the server's key with a successor, or write the successor to the file `out`, to be put there later.

    Coordinators that run on the database take it over within a second. Raises what `Keys.open` does, and OSError.
    """
    with _locked(path):
        keys = Keys.open(path, database)
        keys.server.successor().save(out or path, replace=out is None)
        return Keys.open(path, database)


def open_lineage(path: Path, database: Database) -> SigningKey:
    """The lineage key beside the server's file, made at the first start on a store, and its public key in the store.

    Raises KeysMissing, KeysDamaged, or KeysDiffer when the file holds another key than the store knows: releases name
    that.
    """
    with database.reading() as records:
        stored = records.identity.get("lineage")
    if stored is None:
        _make_lineage(path)
    key = lineage_key(path)
    with database.writing() as records:
        stored = records.identity.get("lineage")
        if stored is None:
            _put(records, "lineage", key.signer)
        else:
            _check_lineage(key, stored, path)
    return key


def open_both(path: Path, database: Database) -> tuple[Keys, SigningKey]:
    """`Keys.open` and `open_lineage`: that one first which the store knows, so that a wrong place gets no new key."""
    with database.reading() as records:
        lineage_first = records.identity.get("lineage") is not None
    if lineage_first:
        lineage = open_lineage(path, database)
        return Keys.open(path, database), lineage
    return Keys.open(path, database), open_lineage(path, database)


def check_keys(path: Path, database: Database) -> None:
    """Raise KeysMissing, KeysDamaged or KeysDiffer where a coordinator would not start with these files."""
    with database.reading() as records:
        server, lineage = (records.identity.get(role) for role in ("server", "lineage"))
    if server is not None:
        _check_server(_load(path), server, path)
    if lineage is not None:
        _check_lineage(lineage_key(path), lineage, path)


def start_anew(path: Path, database: Database) -> Keys:
    """Make keys without predecessors in place of lost files. Another lineage key that is there is taken as it is.

    Devices that pinned a lost key of the server refuse the new one, and tasks whose releases name a lost lineage key
    are paused. Raises KeysDiffer when no key is lost, OSError when a file cannot be written.
    """
    with database.writing() as records:
        stored = records.identity.get("lineage")
        there = lineage_key(path).signer if lineage_file(path).exists() else None
        if path.exists() and stored in (None, there):
            raise KeysDiffer(f"{path} is there, so no key is lost; to give up the key in it, move the file away first")
        if not path.exists():
            key = SucceedingKey.new("server")
            key.save(path)
            _put(records, "server", key.public.hex())
        if stored not in (None, there):
            _make_lineage(path)
            _put(records, "lineage", lineage_key(path).signer)
    return Keys.open(path, database)


def _make_lineage(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        SigningKey.new(lineage_file(path))


def _put(records: Records, role: str, public: str) -> None:
    records.identity.put(role, public)
    records.audit.append(STORE, Action.KEYS_CHANGED, public, role)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock beside a file of keys: without it, one of two simultaneous rotations would lose the other's successor."""
    lock = path.with_name(f"{path.name}.lock")
    with open(os.open(lock, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(path: Path) -> SucceedingKey:
    try:
        return SucceedingKey.load("server", path)
    except FileNotFoundError as error:
        raise KeysMissing(
            f"{path}, the file of the server's key, is not there, and devices have pinned that key: put it back from a "
            "backup, or name its place (MUSTER_KEYS); `muster coordinator keys rotate --lost` gives it up"
        ) from error
    except (InvalidKey, OSError) as error:
        raise KeysDamaged(f"the server's key cannot be read: {error}") from error


def _record(key: SucceedingKey, path: Path, database: Database) -> None:
    with database.writing() as records:
        stored = records.identity.get(key.role)
        if stored is not None:
            _check_server(key, stored, path)
        if stored != key.public.hex():
            _put(records, key.role, key.public.hex())


def _check_server(key: SucceedingKey, stored: str, path: Path) -> None:
    try:
        key.succession.follow(key.role, bytes.fromhex(stored))
    except BrokenSuccession as error:
        raise KeysDiffer(
            f"{path} does not go with this database: {error}. Put the file with the key {stored[:16]}… there, "
            "or name its place (MUSTER_KEYS); all replicas need the same"
        ) from error


def _check_lineage(key: SigningKey, stored: str, path: Path) -> None:
    if stored != key.signer:
        raise KeysDiffer(
            f"{lineage_file(path)} has the lineage key {key.signer}, and this database knows {stored}: put the file "
            "with that key there, or name its place (MUSTER_KEYS); all replicas need the same. `muster coordinator "
            "keys rotate --lost` gives it up, and takes the key that is there"
        )


def lineage_file(keys_file: Path) -> Path:
    """Where the lineage key is that belongs to a file of keys."""
    return keys_file.with_name(f"{keys_file.name}.lineage")


def lineage_key(keys_file: Path) -> SigningKey:
    """The lineage key that belongs to a file of keys. Raises KeysMissing or KeysDamaged."""
    path = lineage_file(keys_file)
    if not path.exists():
        raise KeysMissing(
            f"{path}, the file of the lineage key, is not there, and releases name that key: put it back from a "
            "backup, or name its place (MUSTER_KEYS); a command on tasks can be given --coordinator instead, and "
            "`muster coordinator keys rotate --lost` gives the key up"
        )
    try:
        return SigningKey.load(path)
    except (InvalidKey, OSError) as error:
        raise KeysDamaged(f"{path}, the file of the lineage key, cannot be read: put it back from a backup") from error


def entry(
    key: SigningKey, task: Task, before: Snapshot, checkpoint_sha256: str, params: str | UnsetType = UNSET
) -> Signed | None:
    """What devices are shown with the checkpoint of the round after `before`; None in a task without a release.

    None also in an evaluation under the release of its training, whose lineage is that of the training alone. params:
    the digest of the model, if it is evaluated.
    """
    if task.release is None or decode_release(task.release.text).plan != task.plan_sha256:
        return None
    statement = LineageEntry(
        release=task.release.digest,
        round=before.number + 1,
        parent=before.checkpoint_sha256,
        checkpoint=checkpoint_sha256,
        params=params,
    )
    return key.sign_statement(statement)


def check_signer(key: SigningKey, task: Task) -> None:
    """Raise KeysDiffer when the task's release names another lineage key: devices refuse what this one signs."""
    if task.release is not None and (named := decode_release(task.release.text).lineage) != key.signer:
        raise KeysDiffer(
            f"the release of task {task.id} names the lineage key {named}, and the key here is {key.signer}: put the "
            "right file in its place, or name its place (MUSTER_KEYS)"
        )


def log_proof(key: SigningKey, log: Sequence[Signed], release: Signed) -> LogProof | None:
    """The proof that a release is in the log, all of which is given, in order; None when it is not there."""
    if release not in log:
        return None
    tree, position = Tree([release_.leaf for release_ in log]), log.index(release)
    head = key.sign_statement(TreeHead(size=len(log), root=tree.root.hex()))
    return LogProof(head=head, position=position, path=tree.path(position))
