"""Blobs: immutable bytes named by their SHA-256, sealed where needed, and tied to one database; tasks in both.

An object store is named by its address: `s3://BUCKET/PREFIX`, `gs://…`, `az://…`, or `memory:///`, which ends with the
process. Credentials, regions and endpoints are those of the usual environment (AWS_…, GOOGLE_…, AZURE_…).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import obstore
import safetensors.numpy
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from coordinator.errors import StoreConflict, Unavailable, UnknownBlob, UnusableStore
from coordinator.failpoints import reach
from coordinator.rules.aggregation import Vectors, state_specs
from coordinator.rules.entities import RoundRecord, SealedBlob, Task
from coordinator.store.database import Database
from coordinator.store.records.records import Records
from fedcore import algorithms, checkpoint
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.question import QUESTION
from fedcore.bundle import AlgorithmRef
from fedcore.errors import FedcoreError
from fedcore.plan import BlobRef, Plan
from fedcore.private_files import make_private_folder, new_private, sync_folder

Data: TypeAlias = bytes | memoryview
T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OURS = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{16}\.tmp")
"""Names of blobs and of the remains of killed writes; all other names at the address belong to somebody else."""
_OWNER = "muster-store"
"""Name of the object that says to which database the blobs belong."""
_CHUNK = 1 << 18
_AWAY = "the blobs cannot be reached now; come back later"
_DELETING_S = 5
"""How long a deletion takes at most; below what an idle transaction on PostgreSQL may take (store.engines)."""


class StoredName(NamedTuple):
    """A stored object, and when it was written, in seconds since 1970."""

    name: str
    written_at: float


class Blobs:
    """Content-addressed bytes at `address`, a folder or the URL of an object store.

    Writing is idempotent and survives a power cut once `put` has returned. A folder is made if it is not there and
    `create`; else raises UnusableStore, as it does with an object store's words when that cannot be used: it is asked
    once. Later, Unavailable is raised by every method while it does not answer; the log says why.
    """

    def __init__(self, address: str | Path, *, create: bool = True) -> None:
        self.address = str(address)
        self.opens: Callable[[str], bool] = lambda _: False
        """Asked for a blob that is not there: whether it is now, because it was stored sealed (sealed_blobs.py)."""
        self._write: Callable[[str, Data], object]
        self._write_first: Callable[[str, Data], object]
        self._delete: Callable[[Sequence[str]], int]
        self._store: ObjectStore
        if "://" in str(address):
            self._store = _object_store(str(address))
            self._write = self._upload
            self._write_first = lambda name, data: self._upload(name, data, mode="create")
            self._delete = lambda names: asyncio.run(self._delete_at_once(names))
            return
        folder = Path(address).absolute()
        if create:
            make_private_folder(folder)
        if not folder.is_dir():
            raise UnusableStore(f"there is no blob folder {folder}; start the coordinator first, or name its folder")
        self._store = LocalStore(folder)
        self._write = lambda name, data: _write_durably(folder, name, data)
        self._write_first = lambda name, data: _write_durably(folder, name, data, os.link)
        self._delete = lambda names: _delete_files(folder, names)

    @property
    def owner(self) -> str | None:
        """The id that ties these blobs to a database; None where there is none."""
        try:
            with _reaching():
                return bytes(obstore.get(self._store, _OWNER).bytes()).decode(errors="replace").strip()
        except FileNotFoundError:
            return None

    def claim(self, owner: str) -> str | None:
        """Tie these blobs to a database unless they are tied already; answers the id of the one that has them."""
        self._write_first(_OWNER, f"{owner}\n".encode())
        return self.owner

    def put(self, data: Data) -> BlobRef:
        """Store `data`. The name appears only when the bytes are durable: a blob is whole or absent.

        A blob that exists is written again: it is new then, and garbage collection spares it.
        """
        ref = BlobRef.of(data)
        reach("blob.before-write")
        self._write(ref.sha256, data)
        reach("blob.after-write")
        return ref

    def has(self, sha256: str) -> bool:
        """Whether a blob exists. Raises UnknownBlob for a name that is no digest."""
        name = _checked(sha256)
        with suppress(UnknownBlob):
            return bool(self._find(name, lambda: obstore.head(self._store, name)))
        return False

    def get(self, sha256: str) -> bytes:
        """A blob's bytes. Raises UnknownBlob; fedcore.errors.DigestMismatch when they were altered."""
        name = _checked(sha256)
        data = self._find(name, lambda: bytes(obstore.get(self._store, name).bytes()))
        return BlobRef(sha256, len(data)).check(data)

    def read(self, sha256: str, part: range) -> Iterator[bytes]:
        """A part of a blob's bytes, in pieces and unchecked: the receiver checks the whole. Raises UnknownBlob."""
        if not part:
            return iter(())
        name, within = _checked(sha256), (part.start, part.stop)
        stored = self._find(name, lambda: obstore.get(self._store, name, options={"range": within}))
        return map(bytes, stored.stream(_CHUNK))  # which keeps no piece itself

    def _find(self, name: str, read: Callable[[], T]) -> T:
        """What `read` gives of a blob. Raises UnknownBlob when there is none, Unavailable as all methods do."""
        with _reaching():
            try:
                return read()
            except FileNotFoundError:
                if not self.opens(name):
                    raise UnknownBlob(f"there is no blob {name[:12]}…") from None
            return read()

    def stored(self) -> Iterator[StoredName]:
        """Every stored blob, and the remains of killed writes; not the other files at the address."""
        with _reaching():
            for page in obstore.list(self._store):
                ours = (entry for entry in page if _OURS.fullmatch(entry["path"]))
                yield from (StoredName(entry["path"], entry["last_modified"].timestamp()) for entry in ours)

    def delete(self, names: Sequence[str]) -> int:
        """Delete names that `stored` gave, as many as a few seconds allow, from the first on; answers how many.

        A name that is gone already counts too. The caller must know that no row needs them.
        """
        return self._delete(names) if names else 0

    async def _delete_at_once(self, names: Sequence[str]) -> int:
        try:
            with _reaching(), suppress(FileNotFoundError):
                await asyncio.wait_for(obstore.delete_async(self._store, names), _DELETING_S)
        except TimeoutError as error:
            raise Unavailable(_AWAY) from error
        return len(names)

    def _upload(self, name: str, data: Data, mode: Literal["create", "overwrite"] = "overwrite") -> None:
        missing_bucket = FileNotFoundError
        with _reaching((BaseError, missing_bucket)), suppress(AlreadyExistsError):
            obstore.put(self._store, name, data, mode=mode)


def _object_store(url: str) -> ObjectStore:
    try:
        store = from_url(url)
        for _ in obstore.list(store, chunk_size=1):
            break
    except (BaseError, FileNotFoundError, ValueError) as error:
        raise UnusableStore(f"blobs cannot be kept at {url!r}: {_words(error)}") from error
    return store


def _delete_files(folder: Path, names: Sequence[str]) -> int:
    until = time.monotonic() + _DELETING_S
    for done, name in enumerate(names, 1):
        (folder / name).unlink(missing_ok=True)
        if time.monotonic() > until:
            return done
    return len(names)


def _words(error: Exception) -> str:
    """The message of a store's error on one line, without the library's debug text."""
    return " ".join(str(error).partition("Debug source:")[0].split())


def _checked(sha256: str) -> str:
    """The name of a blob: only 64 hex digits, so that no name leads anywhere else. Raises UnknownBlob."""
    if not _DIGEST.fullmatch(sha256):
        raise UnknownBlob("a blob is named by the 64 lower-case hex digits of its SHA-256")
    return sha256


@contextmanager
def _reaching(failures: tuple[type[Exception], ...] = (BaseError,)) -> Iterator[None]:
    """Raises Unavailable when an object store does not answer, or refuses; the log says why."""
    try:
        yield
    except failures as error:
        _LOG.error("the blobs cannot be reached: %s", _words(error))
        raise Unavailable(_AWAY) from error


def _write_durably(folder: Path, name: str, data: Data, put: Callable[[Path, Path], None] = os.replace) -> None:
    # By hand: an object store's put to a local folder does not wait for the disk.
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        with new_private(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        reach("blob.before-name")
        with suppress(FileExistsError):  # only os.link raises it: somebody was first
            put(temporary, folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    # The name itself is only durable once the folder is; a database row may point at the blob from here on.
    sync_folder(folder)


# Sealed blobs: models of private rounds, unreadable until the transaction that counts them is committed.
#
# The bytes are stored under another name, encrypted with a key that is only in memory until that transaction writes it.
# After it they are stored in plain by the process that committed or, if that died, by the first one that asks for them.
# Spec: docs/spec/privacy.md §3.

_PURPOSE = b"muster: models of private rounds"
_KEY_BYTES, _TAG_BYTES = 32, 16
_NONCE = bytes(12)  # every key seals one blob
_BATCH = 100
"""Sealed blobs that are let go of in one transaction: other writers wait for its end."""


class SealedBlobs:
    """The sealed ones among `blobs`, whose rows are in `database`."""

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database, self._blobs = database, blobs
        blobs.opens = self.open

    def put(self, secret: bytes, data: bytes) -> SealedBlob:
        """Store `data` sealed: under the same secret the same bytes, so that a commit may be tried again."""
        ref = BlobRef.of(data)
        key = HKDF(SHA256(), _KEY_BYTES, salt=bytes.fromhex(ref.sha256), info=_PURPOSE).derive(secret)
        cipher = Cipher(AES256(key), GCM(_NONCE)).encryptor()  # and not AESGCM, which takes no more than 2 GiB
        return SealedBlob(ref, self._blobs.put(b"".join((cipher.update(data), cipher.finalize(), cipher.tag))), key)

    def open(self, sha256: str) -> bool:
        """Store a blob in plain if a row says that it is sealed; whether it is there now.

        Raises Unavailable when it cannot be stored.
        """
        with self._database.reading() as records:
            blob = records.sealed.find(sha256)
        if blob is None:
            return False
        try:
            data = self._blobs.get(blob.sealed.sha256)
            cipher = Cipher(AES256(blob.key), GCM(_NONCE, data[-_TAG_BYTES:])).decryptor()
            self._blobs.put(blob.ref.check(cipher.update(data[:-_TAG_BYTES]) + cipher.finalize()))
        except (UnknownBlob, FedcoreError) as error:
            _LOG.error("blob %s… cannot be opened: %s", sha256[:12], error)
            return False
        except OSError as error:
            _LOG.error("blob %s… cannot be stored in plain: %s", sha256[:12], error)
            raise Unavailable("a model cannot be stored now; come back later") from error
        return True

    def settle(self, stopped: Callable[[], bool]) -> None:
        """Store in plain what is not yet, and let go of its sealed form; what cannot be stored now stays.

        When `stopped` answers true it ends soon.
        """
        with self._database.reading() as records:
            pending = records.sealed.names()
        while pending and not stopped():
            batch, pending = pending[:_BATCH], pending[_BATCH:]
            opened = [name for name in batch if self._in_plain(name)]
            with self._database.writing() as records:
                records.sealed.forget(opened)

    def _in_plain(self, name: str) -> bool:
        with suppress(Unavailable):
            return self._blobs.has(name)
        return False


_ID_BYTES = 16


def check_same_store(database: Database, blobs: Blobs) -> None:
    """Check that database and blobs belong together; at their first use they are tied. Raises UnusableStore."""
    with database.reading() as records:
        store_id, names_blobs = records.identity.get("blobs"), records.identity.names_blobs()
    if store_id is None:
        store_id = _begin(database, blobs)
    owner = blobs.owner
    if owner is None and not names_blobs:
        owner = blobs.claim(store_id)
    if owner is None:
        raise UnusableStore(
            f"the blobs of this database are not at {blobs.address}: mount their folder, or name their place (--blobs, "
            "MUSTER_BLOBS). A copy of them needs the file muster-store too"
        )
    if owner != store_id:
        raise _foreign(blobs)


def _begin(database: Database, blobs: Blobs) -> str:
    """The id of a database that had none. It is committed before the blobs have it: they are never tied to nothing."""
    with database.writing() as records:
        store_id = records.identity.get("blobs")
        if store_id is None:
            if blobs.owner is not None:
                raise _foreign(blobs)
            store_id = secrets.token_hex(_ID_BYTES)
            records.identity.put("blobs", store_id)
        return store_id


def _foreign(blobs: Blobs) -> UnusableStore:
    return UnusableStore(
        f"the blobs at {blobs.address} belong to another database: name that one (--db, MUSTER_DATABASE), or the blobs "
        "of this one (--blobs, MUSTER_BLOBS); for a new database, an empty place"
    )


class OpenedStore:
    """Rows and files that belong together. algorithm_modules: where algorithms may be that are not built in."""

    def __init__(self, database: Database, blobs: Blobs, algorithm_modules: Sequence[str] = ()) -> None:
        self.database, self.blobs, self.algorithm_modules = database, blobs, algorithm_modules
        self.sealed = SealedBlobs(database, blobs)
        self._plans: dict[str, Plan] = {}

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def add_blobs(self, records: Records, refs: Mapping[BlobRef, bool]) -> None:
        """Make stored blobs known; the values say whether devices may have them. Raises StoreConflict.

        Bytes that no row named may have been collected since they were stored. From the row on they are safe, so they
        are looked for after it.
        """
        for ref, public in refs.items():
            records.add_blob(ref, public=public)
            if not self.blobs.has(ref.sha256):
                raise StoreConflict(f"blob {ref.sha256[:12]}… was collected before a row knew it; try again")

    def tasks(self) -> list[Task]:
        """As `TaskStore` says."""
        with self.database.reading() as records:
            return records.tasks()

    def task(self, task_id: str) -> Task:
        """As `TaskStore` says."""
        with self.database.reading() as records:
            return records.task(task_id)

    def rounds(self, task_id: str) -> list[RoundRecord]:
        """As `TaskStore` says."""
        with self.database.reading() as records:
            return records.rounds(records.task(task_id).id)

    def checkpoint(self, task_id: str, number: int | None = None) -> Vectors:
        """The broadcast vectors after round `number`, by default the last committed one; 0 is the start.

        Raises UnknownRound when that round was not committed.
        """
        with self.database.reading() as records:
            task = records.task(task_id)
            snapshot = records.snapshot(task, number)
        # What is broadcast after a round is what the next one begins with.
        plan = self.plan(task.plan_sha256).of_round(snapshot.number + 1)
        return checkpoint.decode(self.blobs.get(snapshot.checkpoint_sha256), plan.broadcast)

    def model_file(self, task_id: str, number: int | None = None) -> bytes:
        """The model after a round, as named tensors in safetensors' format. Raises UnknownRound, as `checkpoint`.

        That of a question, its answer, is in the server's state alone.
        """
        task = self.task(task_id)
        plan, algorithm = self.plan(task.plan_sha256), self.algorithm(task.algorithm)
        if algorithm.family != QUESTION:
            return safetensors.numpy.save(plan.schema.unflatten(self.checkpoint(task_id, number)["params"]))
        with self.database.reading() as records:
            found = self.blobs.get(records.snapshot(task, number).state_sha256)
        state = checkpoint.decode(found, state_specs(plan, algorithm))
        return safetensors.numpy.save(plan.schema.unflatten(state["params"]))

    def plan(self, sha256: str) -> Plan:
        """A registered plan, decoded once."""
        if sha256 not in self._plans:
            self._plans[sha256] = Plan.decode(self.blobs.get(sha256))
        return self._plans[sha256]

    def algorithm(self, ref: AlgorithmRef) -> Algorithm:
        """The algorithm of a task, made from its settings. Raises AlgorithmError."""
        return algorithms.create(ref.name, ref.settings, self.algorithm_modules)
