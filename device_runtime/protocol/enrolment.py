"""Enrolment: a device registers with a coordinator once, and signs with the id that it received.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from device_runtime.errors import SecaggRefused
from device_runtime.permission.policy import NamedAuthority
from device_runtime.protocol.credentials import Credentials, DeviceKeys, KeptCredential
from device_runtime.protocol.transport import Transport
from device_runtime.state.database import StateDatabase, read_json
from fedcore.decoding import decoder
from fedcore.errors import BrokenSuccession
from fedcore.succession import Succession
from fedcore.wire.messages import AttestationEvidence, Enrol, Enrolled, HeldCredential, SecaggParties
from fedcore.wire.signatures import Signer


class Enrolment(msgspec.Struct, frozen=True, kw_only=True):
    """A device's enrolment at a coordinator, and the device key that is enrolled.

    server, authority: the keys of the parties of secure rounds, which the device pinned on first sight; the server's
    key may have followed a succession since. known: False once the coordinator said that it knows no such device.
    """

    key: str
    enrolled: Enrolled
    server: bytes = b""
    authority: bytes = b""
    known: bool = True


_ENROLMENT = decoder(Enrolment)


class Enrolments:
    """A device's enrolment at one coordinator, in the state folder. named: the authority of its policy, if any.

    Only for the holder of the state folder. Every method raises StateError; the constructor also raises KeyUnavailable.
    """

    def __init__(
        self,
        database: StateDatabase,
        coordinator: str,
        keys: DeviceKeys,
        credentials: Credentials,
        named: NamedAuthority | None = None,
    ) -> None:
        self._database = database
        self._coordinator = coordinator
        self._keys = keys
        self._credentials = credentials
        self._named = named
        self._known = self._read()

    @property
    def device(self) -> str:
        """The id at this coordinator; empty before the first enrolment."""
        return "" if self._known is None else self._known.enrolled.device

    @property
    def identity(self) -> Ed25519PrivateKey:
        """The key for secure aggregation."""
        return self._keys.secagg

    def signer(self, transport: Transport) -> Signer:
        """The signer of requests. If this key is not enrolled, the device enrols first. Raises TransportError."""
        enrolment = self._known
        if enrolment is None or not enrolment.known or enrolment.key != self._keys.public[0]:
            enrolment = self._enrol(transport, enrolment)
        return Signer(enrolment.enrolled.device, self._keys.device)

    def forget(self) -> None:
        """Note that the coordinator does not know this device, so that it enrols before the next request."""
        if self._known is not None:
            self._keep(replace(self._known, known=False))

    def credential(self, transport: Transport) -> KeptCredential:
        """The device's credential, with the key of the authority that signed it.

        Raises SecaggRefused when the coordinator has no secure rounds, or uses another authority than the one that the
        device pinned or its policy names; TransportError when a needed call to authority or coordinator fails.
        """
        self.signer(transport)
        enrolment = self._known
        if enrolment is None or enrolment.enrolled.secagg is None:
            enrolment = self._enrol(transport, enrolment)  # the coordinator may have got an authority since
        parties = enrolment.enrolled.secagg
        if parties is None:
            raise SecaggRefused("the coordinator names no enrolment authority, so it has no secure rounds")
        credential = self._credential(enrolment, parties)
        if credential.authority != parties.authority:
            credential, parties = self._of_the_successor(transport, enrolment, parties)
        if credential.authority != parties.authority:
            raise SecaggRefused("the coordinator goes by another enrolment authority than this device does")
        return credential

    def _of_the_successor(
        self, transport: Transport, enrolment: Enrolment, parties: SecaggParties
    ) -> tuple[KeptCredential, SecaggParties]:
        """Credential and parties, both requested again: the authority's key may have a successor since."""
        enrolment = self._enrol(transport, enrolment)
        parties = enrolment.enrolled.secagg or parties
        credential = self._credential(enrolment, parties)
        if credential.authority != parties.authority:
            self._credentials.forget(self._pinned(enrolment))
            credential = self._credential(enrolment, parties)
        return credential, parties

    def refused(self) -> None:
        """Note that the coordinator refused this device's advertisement, so that it requests a new credential."""
        if self._known is not None:
            self._credentials.forget(self._pinned(self._known))

    def _credential(self, enrolment: Enrolment, parties: SecaggParties) -> KeptCredential:
        url = self._named.url if self._named and self._named.url else parties.authority_url
        return self._credentials.of(self._pinned(enrolment), url)

    def _pinned(self, enrolment: Enrolment) -> bytes:
        return self._named.key if self._named else enrolment.authority

    def server(self, shown: Succession | None) -> bytes:
        """The server's current key. If it succeeds the pinned key, it is pinned from now on.

        Raises SecaggRefused when it does not; then nothing changes.
        """
        enrolment = self._known
        if enrolment is None or not enrolment.server:
            raise SecaggRefused("the coordinator named no parties of secure rounds")
        if shown is None:
            raise SecaggRefused("the coordinator does not show the key that signs its invitations")
        try:
            current = shown.follow("server", enrolment.server)
        except BrokenSuccession as error:
            raise SecaggRefused(str(error)) from error
        if current != enrolment.server:
            self._keep(replace(enrolment, server=current))
        return current

    def _enrol(self, transport: Transport, before: Enrolment | None) -> Enrolment:
        key, _ = self._keys.public
        evidence = self._held()
        enrolled = transport.enrol(
            Signer(key, self._keys.device), lambda at: Enrol(attestation=evidence or self._keys.attestation(at))
        )
        fresh = Enrolment(key=key, enrolled=enrolled)
        if before is not None and before.server:
            fresh = replace(fresh, server=before.server, authority=before.authority)
        elif enrolled.secagg is not None:
            fresh = replace(fresh, server=enrolled.secagg.server.current, authority=enrolled.secagg.authority)
        self._keep(fresh)
        return fresh

    def _held(self) -> AttestationEvidence | None:
        """The credential as evidence for the coordinator, if the policy names the authority and its URL."""
        if self._named is None or not self._named.url:
            return None
        credential = self._credentials.of(self._named.key, self._named.url)
        return HeldCredential(credential.secagg, credential.credential)

    def _keep(self, enrolment: Enrolment) -> None:
        text = msgspec.json.encode(enrolment).decode()
        self._database.execute("INSERT OR REPLACE INTO enrolment VALUES (?, ?)", self._coordinator, text)
        self._known = enrolment

    def _read(self) -> Enrolment | None:
        for (text,) in self._database.execute(
            "SELECT enrolled FROM enrolment WHERE coordinator = ?", self._coordinator
        ):
            return read_json(_ENROLMENT, text, "an enrolment in the state database")
        return None
