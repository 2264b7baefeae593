"""Private rounds: the noise that a round's sum gets, and the row of the ledger that is written with its model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import UNSET
from numpy.typing import NDArray

from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.rules.aggregation import ReportSum
from coordinator.rules.entities import NoiseSource, Task
from coordinator.rules.keyed_normals import KEY_BYTES, KeyedNormals
from coordinator.rules.private_sums import (
    add_noise,
    counted,
    entry_of,
    entry_of_devices,
    may_go_on,
    noise_size,
)
from coordinator.rules.robust_aggregation import KeptReports
from coordinator.store.records.records import Records
from fedcore.privacy.accounting import spent
from fedcore.privacy.matrices import inverse_row
from fedcore.privacy.settings import LedgerEntry
from fedcore.signing import SigningKey

_PURPOSE = b"muster: noise of private rounds"
BUDGET_SPENT = "privacy-budget-spent"
"""Why a task is completed before its last round."""


@dataclass(frozen=True, slots=True)
class PrivateSum:
    """The noisy sum of a round, float64 (L,), its row, and the source of its noise, where later rounds need it.

    secret: of the keys under which what is made of it is stored until the row is committed.
    """

    total: NDArray[np.float64]
    entry: LedgerEntry
    source: NoiseSource | None = None
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))


@dataclass(slots=True)
class RoundSum:
    """What was added up of a round. noisy: the same with noise, from the first try of its commit on.

    count: how many additions to it came here, or of how many reports other replicas' sums are. handed: the replicas
    whose sums are in it.
    """

    reports: ReportSum | KeptReports
    noisy: PrivateSum | None = None
    count: int = 0
    handed: set[str] = field(default_factory=set)


def make_private(
    running: OpenRound, lineage: SigningKey, earlier: Sequence[NoiseSource], clip: float, total_L: NDArray[np.float64]
) -> PrivateSum:
    """Add the noise of a round to its sum, unless its devices did.

    earlier: the sources of the noise of the rounds before it. clip: the bound on the l2 norm of a report that its
    devices were sent.

    Noise that later rounds take back is made of a nonce, which is in the database, and the lineage key, which is not:
    a copy of the database is not enough to take noise off a model. The key of other noise is not kept.
    """
    settings, layout, devices = running.task.settings, running.plan.report.decoded, running.value.reported
    # An answer is the sum, which a mean over the goal is not where fewer reported.
    asks = running.plan.question is not UNSET
    total_L = counted(layout, total_L, devices if asks else max(devices, settings.in_round(running.number).goal))
    privacy, size = settings.promise, noise_size(layout)
    if privacy.noise_of_devices:
        return PrivateSum(total_L, entry_of_devices(settings, running.plan.report, running.number, devices))
    deviation = privacy.noise_multiplier * clip
    if privacy.mechanism == "gaussian":
        source, noise_M = None, KeyedNormals.fresh().standard_normal(size)
    else:
        source, noise_M = NoiseSource(secrets.token_bytes(KEY_BYTES), lineage.signer), np.zeros(size)
        sources, key = (*earlier, source), lineage.secret(_PURPOSE)
        for step, weight in inverse_row(privacy.mechanism, privacy.bands, len(sources)).items():
            noise_M += weight * _normals(key, sources[step - 1]).standard_normal(size)
    noise_M *= deviation
    entry = entry_of(privacy, running.number, clip, devices)
    return PrivateSum(add_noise(layout, total_L, noise_M, deviation), entry, source)


def write_row(records: Records, task: Task, private: PrivateSum) -> str | None:
    """Write the row of a round whose noisy sum this transaction releases.

    Answers why the task ends with it, in words, when its budget has no room for another round.
    """
    privacy = task.settings.promise
    entries = (*records.ledger.entries(task.id), private.entry)
    epsilon = spent(entries, privacy.delta)
    records.ledger.append(task.id, private.entry, epsilon, private.source)
    if may_go_on(privacy, entries):
        return None
    return (
        f"another round would exceed the privacy budget: ε {epsilon:.3g} of {privacy.epsilon:g} is spent, at δ "
        f"{privacy.delta:g}"
    )


def _normals(key: bytes, source: NoiseSource) -> KeyedNormals:
    """The normal numbers of a round, the same ones again."""
    return KeyedNormals(HKDF(SHA256(), KEY_BYTES, salt=source.nonce, info=_PURPOSE).derive(key))
