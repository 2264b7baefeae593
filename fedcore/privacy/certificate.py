"""A privacy certificate: what the rounds behind a model spent, signed by the coordinator that ran them.

It lies beside the file of the model, with the ledger, in `CERTIFIED`. Spec: docs/spec/privacy.md. `fedcore.signing`
makes and checks the signature, `fedcore.privacy.verification` computes everything again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from fedcore.decoding import UNDECODABLE, decoded, decoder
from fedcore.errors import PrivacyError
from fedcore.privacy.settings import LedgerEntry, Privacy
from fedcore.release import Signed
from fedcore.validation import Count, Digest, NotNegative

CERTIFICATE_VERSION = 1
CERTIFIED = ".privacy.json"
"""The suffix that turns the name of a model's file into that of its certificate's file."""


class Spending(NamedTuple):
    """An (ε, δ) that several tasks have spent together; ε is infinite once one of them promises nothing.

    By basic composition, which holds whatever a later task makes of what an earlier one released: ε and δ add up
    (Dwork and Roth, "The algorithmic foundations of differential privacy", theorem 3.16 and appendix B).
    """

    epsilon: float
    delta: float

    @classmethod
    def unbounded(cls) -> Spending:
        """That of a task without privacy."""
        return cls(math.inf, 0.0)

    def with_(self, other: Spending) -> Spending:
        """Both together."""
        return Spending(self.epsilon + other.epsilon, self.delta + other.delta)

    @property
    def private(self) -> bool:
        """Whether all promised privacy."""
        return math.isfinite(self.epsilon)

    @property
    def words(self) -> str:
        """The same for people."""
        return f"ε {self.epsilon:.6g} at δ {self.delta:g}" if self.private else "no privacy"


class Ancestor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task at whose model, after round `round`, the next one began. privacy is None if it promised none.

    privacy, rounds, epsilon, ledger: as of the certificate of that model.
    """

    task: str
    round: Count
    privacy: Privacy | None = None
    rounds: Count = 0
    epsilon: NotNegative = 0.0
    ledger: Digest | None = None

    @property
    def spending(self) -> Spending:
        """What it had spent by then."""
        return Spending.unbounded() if self.privacy is None else Spending(self.epsilon, self.privacy.delta)


class PrivacyCertificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An upper bound on what the rounds of a task reveal about any one device, beyond the model that they began from.

    model: SHA-256 of the model's file, after round `round` of a task. privacy: the noise, what is assumed of the rounds
    that a device is in, and the budget. rounds: noisy sums that were released up to that round, those before a rollback
    too. epsilon: what they spent, at the δ of `privacy`. ledger: SHA-256 of their rows (`ledger_digest`). before: the
    tasks at whose models this one and those before it began, nearest first, up to the first without privacy.
    """

    version: int = CERTIFICATE_VERSION
    task: str
    round: Count
    model: Digest
    privacy: Privacy
    rounds: Count
    epsilon: NotNegative
    ledger: Digest
    before: tuple[Ancestor, ...] | UnsetType = UNSET

    @property
    def ancestors(self) -> tuple[Ancestor, ...]:
        """The tasks before this one."""
        return () if self.before is UNSET else self.before


class CertifiedLedger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file beside a model: its certificate as signed, and the ledger that the certificate covers.

    before: the ledgers of the private tasks before this one, in the order of the certificate.
    """

    certificate: Signed
    ledger: tuple[LedgerEntry, ...]
    before: tuple[tuple[LedgerEntry, ...], ...] | UnsetType = UNSET

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
    return decoded(text, _CERTIFICATE, "certificate", PrivacyError, CERTIFICATE_VERSION)


_CERTIFICATE, _CERTIFIED = decoder(PrivacyCertificate), decoder(CertifiedLedger)
