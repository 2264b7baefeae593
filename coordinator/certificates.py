"""Privacy certificates of a coordinator's models, signed with its lineage key. Spec: docs/spec/privacy.md."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from coordinator.errors import NotPrivate
from fedcore.privacy.accounting import spent
from fedcore.privacy.certificate import CertifiedLedger, PrivacyCertificate, ledger_digest
from fedcore.signing import SigningKey

if TYPE_CHECKING:
    from coordinator.store.tasks import CoordinatorStore


def certify(store: CoordinatorStore, key: SigningKey, task_id: str, number: int | None = None) -> CertifiedLedger:
    """The certificate of the model after round `number`, by default the last committed one, with its ledger.

    It counts every round up to that one, those before a rollback too. Raises UnknownTask, UnknownRound, and NotPrivate
    when the task promises no privacy.
    """
    with store.database.reading() as records:
        task = records.task(task_id)
        last = records.snapshot(task, number).number
        rows = records.ledger.entries(task_id, last)
    if task.settings.privacy is None:
        raise NotPrivate(f"task {task_id} was created without --privacy: no noise was added, and no certificate exists")
    privacy = task.settings.promise
    certificate = PrivacyCertificate(
        task=task_id,
        round=last,
        model=hashlib.sha256(store.model_file(task_id, last)).hexdigest(),
        privacy=privacy,
        rounds=len(rows),
        epsilon=spent(rows, privacy.delta),
        ledger=ledger_digest(rows),
    )
    return CertifiedLedger(key.sign_certificate(certificate), rows)
