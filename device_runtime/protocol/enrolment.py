"""Enrolment with a coordinator, and the credentials of an enrolment authority.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from device_runtime.errors import SecaggRefused, TransportError
from device_runtime.permission.policy import NamedAuthority
from device_runtime.protocol.transport import Transport
from device_runtime.state.database import StateDatabase, read_json
from fedcore.errors import BrokenSuccession
from fedcore.signing import Succession
from fedcore.validation import decoder
from fedcore.wire import messages
from fedcore.wire.signatures import PublicKey, Signer, device_id
from secagg.errors import SecaggError
from secagg.keys import check_credential, prove_possession

SPENT = 2 / 3
"""The fraction of its validity after which a credential is renewed."""


class KeptCredential(msgspec.Struct, frozen=True, kw_only=True):
    """A credential of this device's keys. authority: the key that signed it. renew_at: by this device's clock."""

    key: str
    secagg: bytes
    authority: bytes
    credential: bytes
    renew_at: float


_KEPT = decoder(KeptCredential)


@dataclass(frozen=True, slots=True)
class DeviceKeys:
    """The two private keys of a device, for requests and for secure aggregation, and its evidence, if any.

    secret: shared with the receiver. attest: gives the platform's attestation for a challenge.
    """

    device: Ed25519PrivateKey
    secagg: Ed25519PrivateKey
    secret: bytes | None
    attest: Callable[[bytes], messages.Attestation] | None = None

    @property
    def public(self) -> tuple[str, bytes]:
        """The public keys, the first as text."""
        return PublicKey.of(self.device).text, self.secagg.public_key().public_bytes_raw()

    def attestation(self, created: int) -> messages.Attestation:
        """The evidence that this device has, for a request that is signed at `created`."""
        if self.attest is not None:
            return self.attest(messages.attestation_challenge(self.public[0], created))
        if self.secret is None:
            return messages.Unattested()
        return messages.SharedSecret(messages.shared_secret_proof(self.secret, self.public[0], created))


class Credentials:
    """The credentials of a device, by authority, in its state database. Every method raises StateError.

    connect: makes the transport to an authority from its URL. wall: the device's time, in seconds since 1970.
    """

    def __init__(
        self,
        database: StateDatabase,
        keys: DeviceKeys,
        connect: Callable[[str], Transport],
        wall: Callable[[], float],
    ) -> None:
        self._database = database
        self._keys = keys
        self._connect = connect
        self._wall = wall
        self._unheard = False
        """Whether an authority was unreachable in this session; it is tried once."""

    def of(self, authority: bytes, url: str) -> KeptCredential:
        """The credential of an authority whose public key the device has pinned.

        It is renewed in the last third of its validity. While the authority is unreachable, the old one is used until
        it expires. Raises TransportError when there is no credential and the authority issues none, SecaggRefused when
        the issued one is not the authority's for this device.
        """
        credential, now = self._read(authority), self._wall()
        if credential is not None and self._good(credential, now) and (now < credential.renew_at or self._unheard):
            return credential
        try:
            fresh = self._ask(authority, url, now)
        except TransportError:
            if credential is None or not self._good(credential, now):
                raise
            self._unheard = True
            return credential
        text = msgspec.json.encode(fresh).decode()
        self._database.execute("INSERT OR REPLACE INTO credential VALUES (?, ?)", authority.hex(), text)
        return fresh

    def forget(self, authority: bytes) -> None:
        """Drop the credential, which the coordinator did not accept, so that a new one is requested."""
        self._database.execute("DELETE FROM credential WHERE authority = ?", authority.hex())

    def _ask(self, authority: bytes, url: str, now: float) -> KeptCredential:
        key, secagg = self._keys.public

        def message(created: int) -> messages.RequestCredential:
            proof = prove_possession(self._keys.secagg, hashlib.sha256(key.encode()).digest(), created)
            return messages.RequestCredential(
                attestation=self._keys.attestation(created), secagg=secagg, possession=proof
            )

        with self._connect(url) as transport:
            transport.wall = self._wall
            issued: messages.IssuedCredential = transport.credential(Signer(key, self._keys.device), message)
        try:
            current = issued.authority.follow("authority", authority)
            valid = check_credential(current, secagg, issued.credential, 0)
        except (BrokenSuccession, SecaggError) as error:
            raise SecaggRefused(
                "the authority at its URL is not the one that this device pinned", str(error)
            ) from error
        if valid.device.hex() != device_id(key):
            raise SecaggRefused("the authority gave this device the credential of another")
        renew_at = now + SPENT * max(0.0, valid.expires - now)
        return KeptCredential(
            key=key, secagg=secagg, authority=current, credential=issued.credential, renew_at=renew_at
        )

    def _good(self, credential: KeptCredential, now: float) -> bool:
        with contextlib.suppress(SecaggError):
            check_credential(credential.authority, credential.secagg, credential.credential, int(now))
            return True
        return False

    def _read(self, authority: bytes) -> KeptCredential | None:
        """The stored credential, if it is for the device's current keys."""
        query = "SELECT kept FROM credential WHERE authority = ?"
        for (text,) in self._database.execute(query, authority.hex()):
            credential = read_json(_KEPT, text, "a credential in the state database")
            return credential if (credential.key, credential.secagg) == self._keys.public else None
        return None


class Enrolment(msgspec.Struct, frozen=True, kw_only=True):
    """A device's enrolment at a coordinator, and the device key that is enrolled.

    server, authority: the keys of the parties of secure rounds, which the device pinned on first sight; the server's
    key may have followed a succession since. known: False once the coordinator said that it knows no such device.
    """

    key: str
    enrolled: messages.Enrolled
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
        self, transport: Transport, enrolment: Enrolment, parties: messages.SecaggParties
    ) -> tuple[KeptCredential, messages.SecaggParties]:
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

    def _credential(self, enrolment: Enrolment, parties: messages.SecaggParties) -> KeptCredential:
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
            Signer(key, self._keys.device),
            lambda at: messages.Enrol(attestation=evidence or self._keys.attestation(at)),
        )
        fresh = Enrolment(key=key, enrolled=enrolled)
        if before is not None and before.server:
            fresh = replace(fresh, server=before.server, authority=before.authority)
        elif enrolled.secagg is not None:
            fresh = replace(fresh, server=enrolled.secagg.server.current, authority=enrolled.secagg.authority)
        self._keep(fresh)
        return fresh

    def _held(self) -> messages.AttestationEvidence | None:
        """The credential as evidence for the coordinator, if the policy names the authority and its URL."""
        if self._named is None or not self._named.url:
            return None
        credential = self._credentials.of(self._named.key, self._named.url)
        return messages.HeldCredential(credential.secagg, credential.credential)

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
