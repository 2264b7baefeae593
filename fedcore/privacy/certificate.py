"""A privacy certificate: what the rounds behind a model spent, signed by the coordinator that ran them.

It lies beside the file of the model, with the ledger, in `CERTIFIED`. Spec: docs/spec/privacy.md. `fedcore.signing`
makes and checks the signature, `fedcore.privacy.verification` computes everything again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fedcore.decoding import UNDECODABLE, decode_signed, decoder
from fedcore.errors import PrivacyError
from fedcore.privacy.settings import LedgerEntry, Privacy
from fedcore.release import Signed
from fedcore.validation import Count, Digest, NotNegative

CERTIFICATE_VERSION = 1
CERTIFIED = ".privacy.json"
"""The suffix that turns the name of a model's file into that of its certificate's file."""


class PrivacyCertificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An upper bound on what the rounds of a task reveal about any one device, beyond the model that they began from.

    model: SHA-256 of the model's file, after round `round` of a task. privacy: the noise, what is assumed of the rounds
    that a device is in, and the budget. rounds: noisy sums that were released up to that round, those before a rollback
    too. epsilon: what they spent, at the δ of `privacy`. ledger: SHA-256 of their rows (`ledger_digest`).
    """

    version: int = CERTIFICATE_VERSION
    task: str
    round: Count
    model: Digest
    privacy: Privacy
    rounds: Count
    epsilon: NotNegative
    ledger: Digest


class CertifiedLedger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file beside a model: its certificate as signed, and the ledger that the certificate covers."""

    certificate: Signed
    ledger: tuple[LedgerEntry, ...]

    def encode(self) -> bytes:
        """The bytes of the file."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> CertifiedLedger:
        """The inverse of `encode`. Raises PrivacyError."""
        try:
            return _CERTIFIED.decode(data)
        except UNDECODABLE as error:
            raise PrivacyError(f"this is no certificate with its ledger: {error}") from error


def certificate_file(model: Path) -> Path:
    """The path of the certificate of a model's file."""
    return model.with_name(model.name + CERTIFIED)


def ledger_digest(rows: Sequence[LedgerEntry]) -> str:
    """SHA-256 of a ledger in hex: of its rows as JSON with sorted keys and no spaces, each with a line feed."""
    return hashlib.sha256(b"".join(msgspec.json.encode(row, order="sorted") + b"\n" for row in rows)).hexdigest()


def decode_certificate(text: str) -> PrivacyCertificate:
    """The certificate in a signed statement. The caller has checked the signature. Raises PrivacyError."""
    return decode_signed(text, _CERTIFICATE, "certificate", PrivacyError, CERTIFICATE_VERSION)


_CERTIFICATE, _CERTIFIED = decoder(PrivacyCertificate), decoder(CertifiedLedger)
