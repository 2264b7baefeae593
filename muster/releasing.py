"""Releasing: signs the release of a task with secure aggregation, on the machine that has the release key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.rules.task_settings import TaskSettings
    from fedcore.bundle import Bundle
    from fedcore.release import Signed
    from fedcore.signing import SigningKey

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


def release_facts(release: Signed) -> dict[str, object]:
    """What an operator wants to know of a release."""
    from fedcore.release import decode_release

    decoded = decode_release(release.text)
    until = datetime.fromtimestamp(decoded.expires_at, UTC).isoformat(sep=" ", timespec="seconds")
    return {"signer": release.signer, "counter": decoded.counter, "expires": until, "lineage": decoded.lineage}
