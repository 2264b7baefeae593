"""Enrolment: a device's key gets a row, and the device learns the parties of secure rounds.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.exc import IntegrityError

from authority import errors
from authority.attestation import Attestation
from coordinator.api.authentication import demand_allowed
from coordinator.errors import NotAttested
from coordinator.rules.audit import Action
from coordinator.store.tasks import CoordinatorStore
from fedcore.wire.messages import AttestationEvidence, Enrol, Enrolled, HeldCredential, SecaggParties
from fedcore.wire.signatures import device_id
from secagg.errors import SecaggError
from secagg.keys import check_credential


@dataclass(frozen=True, slots=True)
class Registry:
    """Enrols devices, from any thread. parties: gives those of secure rounds; None where there are none."""

    store: CoordinatorStore
    attestation: Attestation
    parties: Callable[[], SecaggParties | None]

    def enrol(self, message: Enrol, key: str, created: int) -> Enrolled:
        """Make the holder of `key` a device; its row is durable when this returns. May be repeated.

        `created` is when the request was signed. Raises NotAttested, or DeviceRevoked.
        """
        kind = self._check(message.attestation, key, created)
        device = device_id(key)
        self._write_once(device, key, kind)
        return Enrolled(device, self.parties())

    def _check(self, evidence: AttestationEvidence, key: str, created: int) -> str:
        """The kind of the evidence. Raises NotAttested."""
        try:
            if isinstance(evidence, HeldCredential):
                return self._check_credential(evidence, key, created)
            return self.attestation.check(evidence, key, created)
        except (errors.NotAttested, SecaggError) as error:
            raise NotAttested(str(error)) from error

    def _check_credential(self, held: HeldCredential, key: str, created: int) -> str:
        parties = self.parties()
        if parties is None:
            raise NotAttested("this coordinator has no enrolment authority")
        credential = check_credential(parties.authority, held.secagg, held.credential, created)
        if credential.device.hex() != device_id(key):
            raise NotAttested("the credential is another device's")
        return "credential"

    def _write_once(self, device: str, key: str, kind: str) -> None:
        with self.store.database.reading() as records:
            enrolled = records.devices.find(device)
        if enrolled is not None:
            demand_allowed(enrolled)
            return
        try:
            with self.store.database.writing() as records:
                records.devices.add(device, key, kind)
                records.audit.append("a device", Action.DEVICE_ENROLLED, device, kind)
        except IntegrityError:
            # Another process enrolled the same key meanwhile: its row is this one.
            with self.store.database.reading() as records:
                if records.devices.find(device) is None:
                    raise
