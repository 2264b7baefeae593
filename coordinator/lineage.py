"""The lineage key, with which a coordinator signs every checkpoint of a task that has a release.

It is in a file of its own beside the coordinator's other keys, the same at all replicas.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from coordinator.rules.entities import Snapshot, Task
from fedcore.release import LineageEntry, Signed
from fedcore.signing import SigningKey


def lineage_key(keys_file: Path) -> SigningKey:
    """The lineage key that belongs to a file of keys, made when missing; only its owner may read it.

    When it is lost, tasks with a release are paused: each names the public key, and must be created anew. Raises
    InvalidKey or OSError.
    """
    path = keys_file.with_name(f"{keys_file.name}.lineage")
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        SigningKey.new(partial)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(partial, path)
        partial.unlink()
    return SigningKey.load(path)


def entry(key: SigningKey, task: Task, before: Snapshot, checkpoint_sha256: str) -> Signed | None:
    """What devices are shown with the checkpoint of the round after `before`; None in a task without a release."""
    if task.release is None:
        return None
    parent, number = before.checkpoint_sha256, before.number + 1
    made = LineageEntry(release=task.release.digest, round=number, parent=parent, checkpoint=checkpoint_sha256)
    return key.sign_entry(made)
