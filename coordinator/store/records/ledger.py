"""Rows of the privacy ledger, within one transaction. They are only ever added. Spec: docs/spec/privacy.md."""

from __future__ import annotations

import msgspec
from sqlalchemy import insert, select

from coordinator.rules.entities import NoiseSource, Spent
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import LEDGER
from fedcore.decoding import converter
from fedcore.privacy.settings import LedgerEntry

_entry = converter(LedgerEntry)


class LedgerRecords(WithinTransaction):
    """The operations on the ledger."""

    def append(self, task: str, entry: LedgerEntry, epsilon: float, source: NoiseSource | None) -> None:
        """Add the row of a round whose noisy sum this transaction releases.

        epsilon: what the task has spent with it. source: of its noise, where later rounds need that again.
        """
        values = {"number": entry.round, "entry": msgspec.to_builtins(entry), "epsilon": epsilon}
        if source is not None:
            values |= {"nonce": source.nonce.hex(), "signer": source.signer}
        self._connection.execute(insert(LEDGER).values(task=task, **values))

    def entries(self, task: str, last: int | None = None) -> tuple[LedgerEntry, ...]:
        """The rows of a task in order, up to round `last` if that is given."""
        query = select(LEDGER.c.entry).where(LEDGER.c.task == task)
        if last is not None:
            query = query.where(LEDGER.c.number <= last)
        return tuple(_entry(row) for row in self._connection.scalars(query.order_by(LEDGER.c.number)))

    def sources(self, task: str) -> tuple[NoiseSource, ...]:
        """The sources of the noise of a task's rounds that were kept, in order."""
        kept = (LEDGER.c.task == task) & LEDGER.c.nonce.is_not(None)
        query = select(LEDGER.c.nonce, LEDGER.c.signer).where(kept).order_by(LEDGER.c.number)
        return tuple(NoiseSource(bytes.fromhex(row.nonce), row.signer) for row in self._connection.execute(query))

    def spent(self, task: str) -> list[Spent]:
        """What a task had spent after each of its private rounds, in order."""
        query = select(LEDGER.c.number, LEDGER.c.epsilon).where(LEDGER.c.task == task).order_by(LEDGER.c.number)
        return [Spent(row.number, row.epsilon) for row in self._connection.execute(query)]
