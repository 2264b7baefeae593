"""The coordinator's own keys: one signs invitations to secure rounds, the other enrols devices.

They are in files, the same at all replicas, and never in the database, so that its copies do not hold them. The store
has the public keys: a process with others does not start. Who pinned an earlier key, the store or a device, follows the
succession to the one that holds now.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy.exc import IntegrityError

from coordinator.errors import KeysDamaged, KeysDiffer, KeysMissing
from coordinator.rules.audit import Action
from coordinator.store.database import Database
from coordinator.store.tasks import STORE
from fedcore.errors import BrokenSuccession, InvalidKey
from fedcore.succession import Role, SucceedingKey, short

_LOG = logging.getLogger(__name__)
_SECRET_BYTES = 32


class Keys:
    """The keys of the server and of the enrolment authority. Any thread may read them, and one calls `hold`.

    path: the file of the server's key; that of the authority is beside it, with `.authority` after its name.
    """

    def __init__(self, server: SucceedingKey, authority: SucceedingKey, path: Path | None = None) -> None:
        self.server = server
        self.authority = authority
        self._path = path

    @classmethod
    def load(cls, path: Path) -> Keys:
        """The keys in their files. Raises KeysMissing or KeysDamaged."""
        server, authority = (_load(role, file) for role, file in _files(path))
        return cls(server, authority, path)

    @classmethod
    def open(cls, path: Path, database: Database) -> Keys:
        """The keys in their files, which are made at the first start on a store, and their public keys in the store.

        When the store has an earlier key than the file, it follows the succession. Raises KeysMissing, KeysDamaged, or
        KeysDiffer when the files hold other keys than the store knows: devices pinned those.
        """
        with database.reading() as records:
            known = records.identity.get("server")
        if known is None:
            for role, file in _files(path):
                with contextlib.suppress(FileExistsError):
                    SucceedingKey.new(role).save(file)
        keys = cls.load(path)
        for key in (keys.server, keys.authority):
            try:
                _record(key, path, database)
            except IntegrityError:  # another process was the first; its key must be this one
                _record(key, path, database)
        return keys

    def hold(self, known: str | None) -> bool:
        """Whether the server's key is the one that the store knows; read anew from its file if it was succeeded."""
        if known is None or self.server.public.hex() == known:
            return True
        with contextlib.suppress(KeysMissing, KeysDamaged):
            found = _load("server", self._path) if self._path else self.server
            if found.public.hex() == known:
                _LOG.warning("the server's key %s succeeds %s", short(found.public), short(self.server.public))
                self.server = found
                return True
        return False

    @property
    def between_replicas(self) -> bytes:
        """A secret derived from the server's key: it authenticates requests that replicas forward to each other."""
        derived = HKDF(SHA256(), _SECRET_BYTES, salt=None, info=b"muster: requests passed on between replicas")
        return derived.derive(self.server.private.private_bytes_raw())


def rotate(path: Path, database: Database, out: Path | None = None) -> Keys:
    """Put a successor in the place of the server's key, or into the file `out`, to be put there later.

    Coordinators that run on the database take it over within a second. Raises what `Keys.open` does, and OSError.
    """
    keys = Keys.open(path, database)
    keys.server.successor().save(out or path, replace=out is None)
    return Keys.open(path, database)


def start_anew(path: Path, database: Database) -> Keys:
    """Make keys that succeed none in the place of lost files. Devices that pinned a lost key refuse the new one.

    Raises KeysDiffer when no file is lost, OSError when one cannot be written.
    """
    lost = [(role, file) for role, file in _files(path) if not file.exists()]
    if not lost:
        raise KeysDiffer(f"{path} is there, so no key is lost; to give up the key in it, move the file away first")
    for role, file in lost:
        key = SucceedingKey.new(role)
        with database.writing() as records:
            key.save(file)
            records.identity.put(role, key.public.hex())
            records.audit.append(STORE, Action.KEYS_CHANGED, key.public.hex(), role)
    return Keys.open(path, database)


def _files(path: Path) -> tuple[tuple[Role, Path], tuple[Role, Path]]:
    return ("server", path), ("authority", path.with_name(f"{path.name}.authority"))


def _load(role: Role, path: Path) -> SucceedingKey:
    try:
        return SucceedingKey.load(role, path)
    except FileNotFoundError as error:
        raise KeysMissing(
            f"{path}, the file of the {role}'s key, is not there, and devices have pinned that key: put it back from a "
            "backup, or name its place (MUSTER_KEYS); `muster coordinator keys rotate --lost` gives it up"
        ) from error
    except (InvalidKey, OSError) as error:
        raise KeysDamaged(f"the {role}'s key cannot be read: {error}") from error


def _record(key: SucceedingKey, path: Path, database: Database) -> None:
    with database.writing() as records:
        known = records.identity.get(key.role)
        if known is not None:
            try:
                key.succession.follow(key.role, bytes.fromhex(known))
            except BrokenSuccession as error:
                raise KeysDiffer(
                    f"{path} does not go with this database: {error}. Put the file with the key {known[:16]}… there, "
                    "or name its place (MUSTER_KEYS); all replicas need the same"
                ) from error
        if known != key.public.hex():
            records.identity.put(key.role, key.public.hex())
            records.audit.append(STORE, Action.KEYS_CHANGED, key.public.hex(), key.role)
