"""Rows of alerts, within one transaction. The rule: coordinator.rules.alerts."""

from __future__ import annotations

import secrets
from typing import Any

from sqlalchemy import Column, Row, Select, delete, insert, select, update

from coordinator.rules.alerts import Alert, AlertEvent, Finding, Watcher, unwatched
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import ALERTS, POPULATIONS, REPLICAS, TASKS

_ALERTS = select(ALERTS, TASKS.c.population, TASKS.c.name.label("task_name")).outerjoin(TASKS)


class AlertRecords(WithinTransaction):
    """The operations on alerts. `due`: whether a webhook is to be told."""

    def watcher(self) -> Watcher | None:
        """The replica that evaluates alerts; None while there is no population. Stays so until a writer ends."""
        columns = (POPULATIONS.c.name, REPLICAS.c.id, REPLICAS.c.seen_at)
        query = select(*columns).outerjoin(REPLICAS, POPULATIONS.c.holder == REPLICAS.c.id)
        query = query.order_by(POPULATIONS.c.created_at, POPULATIONS.c.name).limit(1)
        if self._writing:
            query = query.with_for_update(read=True, of=POPULATIONS)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else Watcher(*row)

    def open(self) -> list[Alert]:
        """Alerts that were not cleared, the newest first."""
        return self._read(_ALERTS.where(ALERTS.c.cleared_at.is_(None)))

    def listed(self, limit: int) -> list[Alert]:
        """What people see: that nobody evaluates alerts, if so, then open ones, then cleared ones, the newest first."""
        return [*unwatched(self.watcher(), self.at), *self._read(_ALERTS.limit(limit))]

    def due(self, limit: int) -> list[AlertEvent]:
        """The first events of which the webhook is still to be told, in order of time."""
        raised = self._timed(ALERTS.c.raised_due, ALERTS.c.raised_at, limit)
        timed = [(at, AlertEvent(alert, cleared=False)) for at, alert in raised]
        cleared = self._timed(ALERTS.c.cleared_due, ALERTS.c.cleared_at, limit)
        timed += [(at, AlertEvent(alert, cleared=True)) for at, alert in cleared]
        return [event for _, event in sorted(timed, key=lambda pair: pair[0])][:limit]

    def _timed(self, due: Column[bool], at: Column[float], limit: int) -> list[tuple[float, Alert]]:
        rows = self._connection.execute(_ALERTS.where(due).order_by(at, ALERTS.c.id).limit(limit))
        return [(getattr(row, at.name), _alert(row)) for row in rows]

    def add(self, found: Finding, *, due: bool) -> None:
        """Raise the alert of a finding."""
        kind, task, subject = found.key
        values: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "kind": kind,
            "task": task,
            "subject": subject,
            "text": found.text,
        }
        values |= {"remedy": found.remedy, "raised_at": self.at, "raised_due": due, "cleared_due": False}
        self._connection.execute(insert(ALERTS), values)

    def clear(self, alert: Alert, *, due: bool) -> None:
        """Clear an open alert: not before it was raised, perhaps by a replica whose clock is ahead."""
        this = update(ALERTS).where(ALERTS.c.id == alert.id)
        self._connection.execute(this.values(cleared_at=max(self.at, alert.raised_at), cleared_due=due))

    def has_old(self, kept_s: float) -> bool:
        """Whether an alert was cleared longer ago than that."""
        old = select(ALERTS.c.id).where(ALERTS.c.cleared_at < self.at - kept_s).limit(1)
        return self._connection.scalar(old) is not None

    def delete_old(self, kept_s: float) -> None:
        """Delete alerts that were cleared longer ago than that, whether or not the webhook was told."""
        self._connection.execute(delete(ALERTS).where(ALERTS.c.cleared_at < self.at - kept_s))

    def delivered(self, event: AlertEvent) -> None:
        """Write that the webhook was told."""
        told = {"cleared_due" if event.cleared else "raised_due": False}
        self._connection.execute(update(ALERTS).where(ALERTS.c.id == event.alert.id).values(**told))

    def _read(self, query: Select[Any]) -> list[Alert]:
        order = (ALERTS.c.cleared_at.is_not(None), ALERTS.c.raised_at.desc(), ALERTS.c.id)
        return [_alert(row) for row in self._connection.execute(query.order_by(*order))]


def _alert(row: Row[Any]) -> Alert:
    return Alert(**{name: getattr(row, name) for name in Alert.__dataclass_fields__})
