"""Releasing: signs the release of a task with secure aggregation, on the machine that has the release key."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from fedcore.errors import BadRelease
from fedcore.release import Signed, decode_release
from fedcore.validation import UNDECODABLE, decoder

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.entities import Evaluates, Regularly
    from coordinator.rules.task_settings import TaskSettings
    from fedcore.bundle import Bundle
    from fedcore.signing import SigningKey

FIRST_COUNTER, VALID_DAYS = 1, 90
_SIGNED = decoder(Signed)


def released(  # noqa: PLR0913  # a release says so much
    bundle: Bundle,
    settings: TaskSettings,
    key: SigningKey,
    lineage: str,
    *,
    evaluation: Evaluates | Regularly | None = None,
    counter: int = FIRST_COUNTER,
    days: int = VALID_DAYS,
    algorithm_modules: Sequence[str] = (),
) -> Signed:
    """The signed release of a bundle for a task with these settings, valid for so many days. Raises InvalidTask.

    lineage: the public key with which the coordinator signs checkpoints. evaluation: what is evaluated; the plan that
    regularly evaluates the task's own models is released too. counter: devices that have seen a greater one of this key
    for the population refuse the release. algorithm_modules: as of `open_coordinator_store`.
    """
    from coordinator.rules.entities import Regularly
    from coordinator.store.starting import release_of

    release = release_of(
        bundle,
        settings,
        lineage,
        counter=counter,
        expires_at=int(time.time()) + days * 24 * 3600,
        algorithm_modules=algorithm_modules,
        evaluation=evaluation.bundle if isinstance(evaluation, Regularly) else None,
    )
    return key.sign_statement(release)


def released_for(
    store: TaskStore,
    bundle: Bundle,
    settings: TaskSettings,
    key: SigningKey,
    algorithm_modules: Sequence[str],
    **more: Any,
) -> Signed:
    """The same for a store, whose lineage key it names, and for the model at which the task begins, if at any."""
    from coordinator.store.starting import started
    from fedcore import algorithms

    named = bundle.manifest.algorithm
    algorithm = algorithms.create(named.name, named.settings, algorithm_modules)
    with tempfile.TemporaryDirectory(prefix="muster-release-") as folder:
        bundle, settings = started(store, bundle, settings, algorithm, store.model, Path(folder))
        lineage = store.lineage().lineage
        return released(bundle, settings, key, lineage, algorithm_modules=algorithm_modules, **more)


def read_release(file: Path) -> Signed:
    """The release that `muster task release` wrote to a file. Its signature is not checked. Raises BadRelease."""
    try:
        return _SIGNED.decode(file.read_bytes())
    except (OSError, *UNDECODABLE) as error:
        raise BadRelease(f"{file} holds no release: write it with `muster task release --out` ({error})") from error


def release_facts(release: Signed) -> dict[str, object]:
    """What an operator wants to know of a release."""
    decoded = decode_release(release.text)
    until = datetime.fromtimestamp(decoded.expires_at, UTC).isoformat(sep=" ", timespec="seconds")
    evaluation = {} if decoded.evaluation is UNSET else {"evaluation": decoded.evaluation.plan}
    facts = {"signer": release.signer, "counter": decoded.counter, "expires": until, "lineage": decoded.lineage}
    return facts | evaluation
