"""Releasing: signs the release of a task with secure aggregation, on the machine that has the release key."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.settings import Settings
    from coordinator.store.tasks import CoordinatorStore, TaskSettings
    from fedcore.bundle import Bundle
    from fedcore.privacy.certificate import CertifiedLedger
    from fedcore.release import Signed
    from fedcore.signing import SigningKey
    from muster.remote import RemoteStore

FIRST_COUNTER, VALID_DAYS = 1, 90


def released(  # noqa: PLR0913  # a release says so much
    bundle: Bundle,
    settings: TaskSettings,
    key: SigningKey,
    lineage: str,
    *,
    counter: int = FIRST_COUNTER,
    days: int = VALID_DAYS,
    algorithm_modules: Sequence[str] = (),
) -> Signed:
    """The signed release of a bundle for a task with these settings, valid for so many days. Raises InvalidTask.

    lineage: the public key with which the coordinator signs checkpoints. counter: devices that have seen a greater one
    of this key for the population refuse the release. algorithm_modules: as of `open_coordinator_store`.
    """
    from coordinator.store.bundles import release_of

    expires_at = int(time.time()) + days * 24 * 3600
    release = release_of(
        bundle, settings, lineage, counter=counter, expires_at=expires_at, algorithm_modules=algorithm_modules
    )
    return key.sign_release(release)


def lineage_of(store: CoordinatorStore | RemoteStore, settings: Callable[[], Settings]) -> str:
    """The public key with which the coordinator of a store signs checkpoints. `settings`: of one on this machine.

    On a store that knows none yet, the key is made. Raises KeysMissing, KeysDamaged or KeysDiffer.
    """
    from coordinator.keys import open_lineage
    from muster.remote import RemoteStore

    if isinstance(store, RemoteStore):
        return store.lineage
    return open_lineage(settings().keys_file, store.database).signer


def roll_back(store: CoordinatorStore | RemoteStore, task: str, number: int, settings: Callable[[], Settings]) -> None:
    """Roll a task back, under the lineage key where the store is on this machine. As the stores' methods.

    Raises also KeysMissing, KeysDamaged, KeysDiffer.
    """
    from coordinator.keys import open_lineage
    from muster.remote import RemoteStore

    if isinstance(store, RemoteStore):
        store.roll_back(task, number)
    else:
        store.roll_back(task, number, open_lineage(settings().keys_file, store.database))


def certificate(
    store: CoordinatorStore | RemoteStore, task: str, number: int | None, settings: Callable[[], Settings]
) -> CertifiedLedger:
    """The privacy certificate of a model, signed with the lineage key as a rollback is. As `coordinator.certificates`.

    Raises also KeysMissing, KeysDamaged, KeysDiffer.
    """
    from coordinator.certificates import certify
    from coordinator.keys import open_lineage
    from muster.remote import RemoteStore

    if isinstance(store, RemoteStore):
        return store.certificate(task, number)
    return certify(store, open_lineage(settings().keys_file, store.database), task, number)


def release_facts(release: Signed) -> dict[str, object]:
    """What an operator wants to know of a release."""
    from fedcore.release import decode_release

    found = decode_release(release.text)
    until = datetime.fromtimestamp(found.expires_at, UTC).isoformat(sep=" ", timespec="seconds")
    return {"signer": release.signer, "counter": found.counter, "expires": until, "lineage": found.lineage}
