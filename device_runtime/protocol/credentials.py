"""Credentials of enrolment authorities: requested, checked, stored, and renewed before they expire.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_runtime.errors import SecaggRefused, TransportError
from device_runtime.protocol.transport import Transport
from device_runtime.state.database import StateDatabase, read_json
from fedcore.decoding import decoder
from fedcore.errors import BrokenSuccession
from fedcore.wire.attestation import attestation_challenge, shared_secret_proof
from fedcore.wire.messages import Attestation, IssuedCredential, RequestCredential, SharedSecret, Unattested
from fedcore.wire.signatures import PublicKey, Signer, device_id
from secagg.credentials import check_credential, prove_possession
from secagg.errors import SecaggError

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
    attest: Callable[[bytes], Attestation] | None = None

    @property
    def public(self) -> tuple[str, bytes]:
        """The public keys, the first as text."""
        return PublicKey.of(self.device).text, self.secagg.public_key().public_bytes_raw()

    def attestation(self, created: int) -> Attestation:
        """The evidence that this device has, for a request that is signed at `created`."""
        if self.attest is not None:
            return self.attest(attestation_challenge(self.public[0], created))
        if self.secret is None:
            return Unattested()
        return SharedSecret(shared_secret_proof(self.secret, self.public[0], created))


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

        def message(created: int) -> RequestCredential:
            proof = prove_possession(self._keys.secagg, hashlib.sha256(key.encode()).digest(), created)
            return RequestCredential(attestation=self._keys.attestation(created), secagg=secagg, possession=proof)

        with self._connect(url) as transport:
            transport.wall = self._wall
            issued: IssuedCredential = transport.credential(Signer(key, self._keys.device), message)
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
