"""Rows of the audit log, within one transaction. They are only ever added. The chain: rules/audit.py."""

from __future__ import annotations

from dataclasses import asdict, replace

from sqlalchemy import func, insert, select

from coordinator.rules.audit import Action, AuditEntry
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import AUDIT

_LAST = select(func.max(AUDIT.c.number))
_MOST = 1000
"""Entries in one answer."""


class AuditRecords(WithinTransaction):
    """The operations on the audit log."""

    def append(self, actor: str, action: Action, subject: str, detail: str = "") -> None:
        """Add an entry. The last thing in a transaction: other writers of the log wait for its end."""
        self._lock_writers(AUDIT)
        query = select(AUDIT.c.number, AUDIT.c.sha256).order_by(AUDIT.c.number.desc()).limit(1)
        number, previous = self._connection.execute(query).one_or_none() or (0, "")
        entry = AuditEntry(
            number=number + 1, at=self.at, actor=actor, action=action.value, subject=subject, detail=detail, sha256=""
        )
        entry = replace(entry, sha256=entry.chained(previous))
        self._connection.execute(insert(AUDIT).values(**asdict(entry)))

    def last(self) -> int:
        """The number of the last entry; 0 for none."""
        return self._connection.scalar(_LAST) or 0

    def entries(self, after: int | None, limit: int) -> list[AuditEntry]:
        """The first `limit` entries after that number, or the last ones; in order, at most a thousand."""
        query = select(AUDIT).order_by(AUDIT.c.number.desc())
        if after is not None:
            query = select(AUDIT).where(AUDIT.c.number > after).order_by(AUDIT.c.number)
        rows = self._connection.execute(query.limit(min(limit, _MOST)))
        entries = [AuditEntry(**row._mapping) for row in rows]
        return entries if after is not None else entries[::-1]

    def about_devices(self, after: int) -> list[tuple[str, Action]]:
        """The devices that were revoked or allowed again after that entry, in order."""
        actions = (Action.DEVICE_REVOKED, Action.DEVICE_ALLOWED)
        query = select(AUDIT.c.subject, AUDIT.c.action).where((AUDIT.c.number > after) & AUDIT.c.action.in_(actions))
        return [(row.subject, Action(row.action)) for row in self._connection.execute(query.order_by(AUDIT.c.number))]
