"""Proofs of attestation, computed alike at both ends. Spec: docs/spec/wire.md §9."""

from __future__ import annotations

import hashlib
import hmac

DOMAIN = b"muster.attestation.v1\0"
CHALLENGE_DOMAIN = b"muster.attestation-challenge.v1\0"


def shared_secret_proof(secret: bytes, key: str, created: int) -> bytes:
    """32 bytes that prove knowledge of the secret, for a public key (its text) at a time (seconds since 1970)."""
    return hmac.digest(secret, DOMAIN + f"{key}\0{created}".encode(), hashlib.sha256)


def attestation_challenge(key: str, created: int) -> bytes:
    """32 bytes that name a public key (its text) and a time (seconds since 1970), for a phone's platform to attest."""
    return hashlib.sha256(CHALLENGE_DOMAIN + f"{key}\0{created}".encode()).digest()
