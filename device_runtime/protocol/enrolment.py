"""Enrolment: a device makes itself known to a coordinator once, and signs with the id that it was given.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from device_runtime.errors import SecaggRefused, StateDamaged
from device_runtime.protocol.transport import Transport
from device_runtime.state.database import StateDatabase
from device_runtime.state.identity import device_key, secagg_key
from device_runtime.state.sealing import Sealer
from fedcore.decoding import decoder
from fedcore.errors import BrokenSuccession
from fedcore.succession import Succession
from fedcore.wire.attestation import shared_secret_proof
from fedcore.wire.messages import AttestationEvidence, Credential, Enrol, Enrolled, SharedSecret, Unattested
from fedcore.wire.signatures import PublicKey, Signer


class Enrolment(msgspec.Struct, frozen=True, kw_only=True):
    """A device's enrolment at a coordinator, and the keys of its own that it holds for.

    server, authority: the pinned keys for secure aggregation: as they were at the first enrolment, or the successors
    that the device followed since. known: False once the coordinator said that it knows no such device.
    """

    key: str
    secagg: bytes
    enrolled: Enrolled
    server: bytes = b""
    authority: bytes = b""
    known: bool = True


_ENROLMENT = decoder(Enrolment)


class Enrolments:
    """A device's enrolment at one coordinator, in the state folder. secret: what it proves to know, if anything.

    Only for the holder of the state folder. Every method raises StateError, and so does making one, or
    KeyUnavailable.
    """

    def __init__(
        self, database: StateDatabase, folder: Path, sealer: Sealer, coordinator: str, secret: bytes | None = None
    ) -> None:
        self._database = database
        self._coordinator = coordinator
        self._secret = secret
        self._key = device_key(folder, sealer)
        self._secagg = secagg_key(folder, sealer)
        self._public = PublicKey.of(self._key).text, self._secagg.public_key().public_bytes_raw()
        self._known = self._read()

    @property
    def device(self) -> str:
        """The id at this coordinator; empty before the first enrolment."""
        return "" if self._known is None else self._known.enrolled.device

    @property
    def identity(self) -> Ed25519PrivateKey:
        """The key for secure aggregation."""
        return self._secagg

    def signer(self, transport: Transport) -> Signer:
        """The signer of requests; it enrols first when these keys are not enrolled. Raises TransportError."""
        known = self._known
        if known is None or not known.known or (known.key, known.secagg) != self._public:
            known = self._enrol(transport, known)
        return Signer(known.enrolled.device, self._key)

    def forget(self) -> None:
        """The coordinator knows no such device: enrol before the next request."""
        if self._known is not None:
            self._keep(replace(self._known, known=False))

    def credential(self) -> Credential:
        """The credential for secure aggregation.

        Raises SecaggRefused when the coordinator gave nothing of the kind, or shows another authority than at first.
        """
        known, given = self._enrolled()
        if given.authority != known.authority:
            raise SecaggRefused("the coordinator shows another authority than the one that this device pinned")
        return given

    def server(self, shown: Succession | None) -> bytes:
        """The server's key, given the one that it shows now; pinned from now on if it succeeds the pinned one.

        Raises SecaggRefused when it does not: then nothing changes.
        """
        known, _ = self._enrolled()
        if shown is None:
            raise SecaggRefused("the coordinator does not show the key that signs its invitations")
        try:
            current = shown.follow("server", known.server)
        except BrokenSuccession as error:
            raise SecaggRefused(str(error)) from error
        if current != known.server:
            self._keep(replace(known, server=current))
        return current

    def _enrolled(self) -> tuple[Enrolment, Credential]:
        known = self._known
        if known is None or known.enrolled.secagg is None:
            raise SecaggRefused("the coordinator enrolled this device, and not for secure aggregation")
        return known, known.enrolled.secagg

    def _enrol(self, transport: Transport, before: Enrolment | None) -> Enrolment:
        key, secagg = self._public
        enrolled = transport.enrol(
            Signer(key, self._key), lambda at: Enrol(attestation=self._evidence(at), secagg=secagg)
        )
        fresh = Enrolment(key=key, secagg=secagg, enrolled=enrolled)
        if before is not None and before.server:
            fresh = replace(fresh, server=before.server, authority=before.authority)
        elif enrolled.secagg is not None:
            fresh = replace(fresh, server=enrolled.secagg.server.current, authority=enrolled.secagg.authority)
        self._keep(fresh)
        return fresh

    def _evidence(self, created: int) -> AttestationEvidence:
        if self._secret is None:
            return Unattested()
        return SharedSecret(shared_secret_proof(self._secret, self._public[0], created))

    def _keep(self, enrolment: Enrolment) -> None:
        text = msgspec.json.encode(enrolment).decode()
        self._database.execute("INSERT OR REPLACE INTO enrolment VALUES (?, ?)", self._coordinator, text)
        self._known = enrolment

    def _read(self) -> Enrolment | None:
        for (kept,) in self._database.execute(
            "SELECT enrolled FROM enrolment WHERE coordinator = ?", self._coordinator
        ):
            try:
                return _ENROLMENT.decode(kept)
            except msgspec.MsgspecError as error:
                raise StateDamaged("an enrolment in the state database cannot be read", str(error)) from error
        return None
