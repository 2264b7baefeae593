"""The lineage key, with which a coordinator signs the checkpoints of released tasks, and heads of the log of releases.

It is in a file of its own beside the coordinator's other keys, the same at all replicas. The store has the public key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType

from coordinator.errors import KeysDamaged, KeysDiffer, KeysMissing
from coordinator.rules.entities import Snapshot, Task
from fedcore.errors import InvalidKey
from fedcore.release import LineageEntry, LogProof, Signed, TreeHead, decode_release
from fedcore.signing import SigningKey
from secagg.graph import Tree


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
