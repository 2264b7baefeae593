"""Enrolment: a device's key gets a row, and its key for secure aggregation a credential.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import hashlib

from sqlalchemy.exc import IntegrityError

from coordinator.api.attestation import Attestation
from coordinator.api.authentication import demand_allowed
from coordinator.keys import Keys
from coordinator.rules.audit import Action
from coordinator.store.tasks import CoordinatorStore
from fedcore.wire.messages import Credential, Enrol, Enrolled
from secagg.keys import enrol

_ID_HEX = 32


def device_id(key: str) -> str:
    """The id of the device with this public key (as text): the same whenever and wherever it enrols."""
    return hashlib.sha256(key.encode()).hexdigest()[:_ID_HEX]


class Registry:
    """Enrols devices, from any thread."""

    def __init__(self, store: CoordinatorStore, keys: Keys, attestation: Attestation) -> None:
        self._store = store
        self._keys = keys
        self._attestation = attestation

    def enrol(self, message: Enrol, key: str, created: int) -> Enrolled:
        """Make the holder of `key` a device; its row is durable when this returns. May be repeated.

        `created` is when the request was signed. Raises NotAttested, or DeviceRevoked.
        """
        kind = self._attestation.check(message.attestation, key, created)
        device = device_id(key)
        self._write_once(device, key, kind)
        return Enrolled(device, None if message.secagg is None else self._vouch(message.secagg))

    def _write_once(self, device: str, key: str, kind: str) -> None:
        with self._store.database.reading() as records:
            found = records.devices.find(device)
        if found is not None:
            demand_allowed(found)
            return
        try:
            with self._store.database.writing() as records:
                records.devices.add(device, key, kind)
                records.audit.append("a device", Action.DEVICE_ENROLLED, device, kind)
        except IntegrityError:
            # Another process enrolled the same key meanwhile: its row is this one.
            with self._store.database.reading() as records:
                if records.devices.find(device) is None:
                    raise

    def _vouch(self, id_: bytes) -> Credential:
        authority = self._keys.authority
        return Credential(enrol(authority.private, id_), self._keys.server.succession, authority.public)
