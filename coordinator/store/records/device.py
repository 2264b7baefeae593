"""Rows of enrolled devices, within one transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, func, insert, select, update

from coordinator.rules.entities import Device
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import DEVICES


class DeviceRecords(WithinTransaction):
    """The operations on devices."""

    def find(self, device_id: str) -> Device | None:
        """An enrolled device; None when none has this id."""
        row = self._connection.execute(select(DEVICES).where(DEVICES.c.id == device_id)).one_or_none()
        return None if row is None else _device(row)

    def add(self, device_id: str, key: str, attestation: str) -> None:
        """Enrol a device under its public key (as text)."""
        algorithm, _, public_key = key.partition(":")
        values = {"algorithm": algorithm, "public_key": public_key, "attestation": attestation}
        self._connection.execute(insert(DEVICES).values(id=device_id, **values, enrolled_at=self.at))

    def newest(self, limit: int, *, revoked: bool) -> list[Device]:
        """The devices that enrolled last, the newest first; or those that were revoked, the last one first."""
        query = select(DEVICES).order_by(DEVICES.c.enrolled_at.desc(), DEVICES.c.id)
        if revoked:
            query = select(DEVICES).where(DEVICES.c.revoked_at.is_not(None)).order_by(DEVICES.c.revoked_at.desc())
        return [_device(row) for row in self._connection.execute(query.limit(limit))]

    def counts(self) -> tuple[int, int]:
        """How many devices are enrolled, and how many of them are revoked."""
        enrolled, revoked = self._connection.execute(select(func.count(), func.count(DEVICES.c.revoked_at))).one()
        return enrolled, revoked

    def set_revoked(self, device_id: str, *, revoked: bool) -> bool:
        """Revoke a device, or allow it again; whether that changed anything."""
        this, already = DEVICES.c.id == device_id, DEVICES.c.revoked_at.is_not(None)
        change = update(DEVICES).where(this & (~already if revoked else already))
        return self._connection.execute(change.values(revoked_at=self.at if revoked else None)).rowcount == 1


def _device(row: Row[Any]) -> Device:
    same = ("id", "attestation", "enrolled_at", "revoked_at")
    return Device(**{name: getattr(row, name) for name in same}, key=f"{row.algorithm}:{row.public_key}")
