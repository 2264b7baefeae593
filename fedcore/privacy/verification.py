"""Verification of a privacy certificate. It needs only the model's file and the ledger beside it."""

from __future__ import annotations

import hashlib
import math

import msgspec
from msgspec import UNSET

from fedcore.errors import BadSignature, InvalidKey
from fedcore.privacy.accounting import spent
from fedcore.privacy.settings import (
    Ancestor,
    CertifiedLedger,
    LedgerEntry,
    Noise,
    Privacy,
    PrivacyCertificate,
    Spending,
    decode_certificate,
    ledger_digest,
)
from fedcore.signing import verified

SAME_EPSILON = 1e-6
"""The relative difference that two computations of ε may have: versions of the accountant round differently."""


def same_epsilon(first: float, second: float) -> bool:
    """Whether two computed values may be the same ε."""
    return math.isclose(first, second, rel_tol=SAME_EPSILON)


class Verdict(msgspec.Struct, frozen=True):
    """A certificate, its signer, ε computed again, and sentences about what does not hold: none if all does.

    total: with the tasks before this one. demanded: whether the caller named the signer. If not, the verdict is worth
    as much as one's trust in the signer: anybody can sign anything.
    """

    certificate: PrivacyCertificate
    signer: str
    demanded: bool
    epsilon: float
    total: Spending
    wrong: tuple[str, ...]


def verify(model: bytes, certified: CertifiedLedger, signer: str | None = None) -> Verdict:
    """Recompute everything in a certificate. Raises PrivacyError if it cannot be read, or ε cannot be computed.

    model: the bytes of the model's file. signer: the public key that must have signed it, if known.
    """
    signed, rows = certified.certificate, certified.ledger
    certificate = decode_certificate(signed.text)
    wrong = []
    try:
        verified(signed, PrivacyCertificate)
    except (BadSignature, InvalidKey) as error:
        wrong.append(f"signature: {error}")
    if signer is not None and signer != signed.signer:
        wrong.append(f"signer: {signed.signer} signed it, not {signer}")
    model_digest = hashlib.sha256(model).hexdigest()
    if model_digest != certificate.model:
        wrong.append(f"model: the file has SHA-256 {model_digest}, the certificate is for {certificate.model}")
    epsilon = spent(rows, certificate.privacy.delta)
    wrong += _ledger(certificate, certificate.privacy, rows, epsilon)
    total, others = _before(certificate, () if certified.before is UNSET else certified.before)
    total = total.with_(Spending(epsilon, certificate.privacy.delta))
    return Verdict(certificate, signed.signer, signer is not None, epsilon, total, (*wrong, *others))


def _before(
    certificate: PrivacyCertificate, ledgers: tuple[tuple[LedgerEntry, ...], ...]
) -> tuple[Spending, list[str]]:
    """What the tasks before have spent by their ledgers, and sentences about what does not hold of them."""
    total, wrong = Spending(0.0, 0.0), []
    private = [(one, one.privacy) for one in certificate.ancestors if one.privacy is not None]
    if len(ledgers) != len(private) or any(one.privacy is None for one in certificate.ancestors[:-1]):
        wrong.append(f"before: {len(private)} private tasks, and {len(ledgers)} ledgers")
    for (one, privacy), rows in zip(private, ledgers, strict=False):
        epsilon = spent(rows, privacy.delta)
        total = total.with_(Spending(epsilon, privacy.delta))
        wrong += [f"task {one.task}: {words}" for words in _ledger(one, privacy, rows, epsilon)]
    return total if len(private) == len(certificate.ancestors) else Spending.unbounded(), wrong


def _ledger(
    certificate: PrivacyCertificate | Ancestor, privacy: Privacy, rows: tuple[LedgerEntry, ...], epsilon: float
) -> list[str]:
    """Sentences about the contradictions between a ledger, which spends `epsilon`, and what is said of it."""
    wrong = []
    if (digest := ledger_digest(rows)) != certificate.ledger:
        wrong.append(f"ledger: its digest is {digest}, the certificate names {certificate.ledger}")
    wrong += _rows(certificate, privacy, rows)
    if not same_epsilon(epsilon, certificate.epsilon):
        wrong.append(f"epsilon: the ledger spends {epsilon:.6g}, the certificate says {certificate.epsilon:.6g}")
    if epsilon > privacy.epsilon * (1 + SAME_EPSILON):
        wrong.append(f"budget: the ledger spends {epsilon:.6g}, and the task may spend {privacy.epsilon:g}")
    return wrong


def _rows(certificate: PrivacyCertificate | Ancestor, privacy: Privacy, rows: tuple[LedgerEntry, ...]) -> list[str]:
    """Sentences about the contradictions between a ledger's rows and what is said of them."""
    wrong = []
    if len(rows) != certificate.rounds:
        wrong.append(f"rounds: the ledger has {len(rows)}, the certificate says {certificate.rounds}")
    if certificate.round and not rows:
        wrong.append(f"rounds: the ledger has none, and the model is that after round {certificate.round}")
    numbers = [row.round for row in rows]
    if numbers != sorted(set(numbers)) or (numbers and numbers[-1] > certificate.round):
        wrong.append(f"rounds: they must ascend, each once, up to round {certificate.round}")
    apart, mechanism = privacy.min_separation_rounds, privacy.mechanism
    if apart > 1 and numbers != list(range(1, len(rows) + 1)):
        wrong.append(f"rounds: devices are counted on to be {apart} rounds apart, and the ledger leaves rounds out")
    if mechanism in ("tree", "banded") and len({row.clip for row in rows}) > 1:
        wrong.append(f"clip: noise of the mechanism {mechanism} has one size in all rounds, and the bounds differ")
    if privacy.sampling_probability < 1:
        wrong.append("sampling_probability: devices come when they can, and no task draws them by chance alone")
    for name in Noise.__struct_fields__:
        promised = getattr(privacy, name)
        for row in rows:
            if getattr(row, name) != promised:
                value = getattr(row, name)
                wrong.append(f"{name}: round {row.round} has {value!r}, the certificate says {promised!r}")
                break
    return wrong
