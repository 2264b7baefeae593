"""Attestation: evidence that a key belongs to a device, and not to any sender of requests.

An authority checks it for every credential that it issues, a coordinator when a device enrols without one. Spec:
docs/spec/wire.md §9. A further kind is a message in `fedcore.wire.messages`, and a case here.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from authority.android import AndroidPhones
from authority.apple import ApplePhones
from authority.errors import BadSecret, NotAttested
from fedcore.wire import messages
from fedcore.wire.attestation import attestation_challenge, shared_secret_proof
from fedcore.wire.messages import AndroidKey, AppAttest, SharedSecret, Unattested

LEAST_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class Attestation:
    """The evidence that is accepted: none, a shared secret, an Android phone, an iOS device, or any of several."""

    accept_unattested: bool
    secret: bytes | None = field(default=None, repr=False)
    phones: AndroidPhones | None = None
    apples: ApplePhones | None = None

    @classmethod
    def of(
        cls,
        accept_unattested: bool,
        secret_file: Path | None,
        android_file: Path | None = None,
        apple_file: Path | None = None,
    ) -> Attestation:
        """An attestation from files. White space around the secret is dropped.

        Raises BadSecret, BadAndroidFile or BadAppleFile.
        """
        return cls(
            accept_unattested,
            None if secret_file is None else _secret(secret_file),
            None if android_file is None else AndroidPhones.load(android_file),
            None if apple_file is None else ApplePhones.load(apple_file),
        )

    def check(self, evidence: messages.Attestation, key: str, created: int) -> str:
        """The kind of the evidence for a public key, in a request signed at `created`. Raises NotAttested."""
        match evidence:
            case SharedSecret(proof):
                if self.secret is None:
                    raise NotAttested("no enrolment secret is known here")
                if not hmac.compare_digest(proof, shared_secret_proof(self.secret, key, created)):
                    raise NotAttested("the proof was not made with the enrolment secret that is known here")
                return "shared-secret"
            case AndroidKey(chain):
                if self.phones is None:
                    raise NotAttested("no Android phone is taken here")
                self.phones.check(chain, attestation_challenge(key, created), created)
                return "android-key"
            case AppAttest(statement):
                if self.apples is None:
                    raise NotAttested("no iOS device is taken here")
                self.apples.check(statement, attestation_challenge(key, created), created)
                return "app-attest"
            case Unattested():
                if not self.accept_unattested:
                    raise NotAttested("no device is taken here without an attestation")
                return "none"


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise BadSecret(f"the enrolment secret cannot be read: {error}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise BadSecret(f"{path} holds {len(secret)} bytes; an enrolment secret has at least {LEAST_SECRET_BYTES}")
    return secret
