"""The privacy of a task, the ledger of its rounds, and a certificate of what the rounds behind a model spent."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from fedcore.errors import PrivacyError
from fedcore.labels import Target
from fedcore.release import Signed
from fedcore.validation import (
    UNDECODABLE,
    Count,
    Digest,
    NotNegative,
    check,
    checked,
    decoded,
    decoder,
    demand,
    setting,
)

Mechanism: TypeAlias = Literal["gaussian", "tree", "banded", "distributed"]
"""How the sums of rounds are noised.

gaussian: by new noise in every round. tree, banded: by noise of DP-FTRL from a binary tree or a banded matrix, much of
which later rounds cancel. distributed: by the devices of secure rounds, each of which adds a share to its own report
(`fedcore.privacy.accounting`).
"""
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6
"""Noise multipliers whose ε an accountant can compute: less hides nothing, and more leaves nothing to learn from."""
MOST_TREE_ROUNDS = 1024
"""The most rounds of a tree: every commit computes its sensitivity in time quadratic in the rounds."""
BANDS = "Diagonals of the matrix of banded, from 2 to min_separation_rounds."
DELTA = "Chance that epsilon leaves open, below 1 / users."
_NOISE = "Standard deviation of the new noise on a sum, over the bound on a report."
_demand = partial(demand, PrivacyError)
Positive = Annotated[float, msgspec.Meta(gt=0)]
WholeFromOne = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]


@checked(PrivacyError)
class Noise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The noise of a round, and assumptions about the rounds that a device is in: all that an accountant needs.

    A sampling_probability below 1 is that of Poisson sampling, as only a simulation can; 1 claims nothing about which
    devices come. Raises PrivacyError naming the field and what it may be.
    """

    noise_multiplier: Annotated[float, setting(_NOISE, ge=LEAST_NOISE, le=MOST_NOISE)]
    mechanism: Annotated[Mechanism, setting("How sums are noised.")] = "gaussian"
    min_separation_rounds: Annotated[WholeFromOne, setting("Least rounds between two participations; 1 is none.")] = 1
    bands: Annotated[WholeFromOne, setting(BANDS)] = 1
    sampling_probability: Annotated[Probability, setting("Chance of each device to be in a round, drawn anew.")] = 1.0

    def __post_init__(self) -> None:
        check(self)
        if self.mechanism == "banded":
            allowed = f"from 2 to min_separation_rounds ({self.min_separation_rounds})"
            _demand(2 <= self.bands <= self.min_separation_rounds, "bands", allowed, self.bands)
        else:
            _demand(self.bands == 1, "bands", f"1 for the mechanism {self.mechanism}", self.bands)
        if self.sampling_probability < 1 and (self.mechanism != "gaussian" or self.min_separation_rounds > 1):
            raise PrivacyError(
                "sampling_probability below 1 is for the mechanism gaussian without a separation of rounds: Poisson "
                "sampling decides anew in every round, and does not amplify noise that is correlated over rounds"
            )


@checked(PrivacyError)
class Privacy(Noise, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a task promises: (ε, δ)-differential privacy for every device, and the noise by which it is kept.

    Two runs are neighbours when one device's reports are zeros in one of them. The participants and their number are
    public.

    No round starts that would exceed the budget. δ is below 1 / users, because a larger δ would allow a model that
    reveals a person.
    """

    epsilon: Annotated[Positive, setting("Most that all models together may say of a device.")]
    delta: Annotated[Positive, setting(DELTA)]
    users: Annotated[WholeFromOne, setting("Size of the population.")]

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand(self.delta < 1 / self.users, "delta", f"below 1 / users, which is {1 / self.users:g}", self.delta)

    @property
    def noise_of_devices(self) -> float:
        """The noise multiplier that devices must produce; 0 if the coordinator adds the noise."""
        return self.noise_multiplier if self.mechanism == "distributed" else 0.0


@checked(PrivacyError)
class LedgerEntry(Noise, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A noised sum that was released: one row of a task's ledger.

    honest and square are 0 unless devices add the noise. target: of the task, absent if it has none.
    """

    round: Annotated[Count, setting("Number of the round.")]
    clip: Annotated[Positive, setting("Bound on the L2 norm of every report in it.")]
    devices: Annotated[Count, setting("Reports that it sums.")]
    honest: Annotated[Count, setting("Devices assumed to add their share of the noise.")] = 0
    square: Annotated[Count, setting("Bound on the squared L2 norm of a report, in steps of its rounding.")] = 0
    target: Annotated[Target, setting("Expression on the labels of its devices.")] | UnsetType = UNSET

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand((self.square > 0) is (self.mechanism == "distributed"), "square", "above 0 if distributed", self.square)
        _demand(self.honest <= self.devices, "honest", f"at most the devices ({self.devices})", self.honest)


# A privacy certificate: what the rounds behind a model spent, signed by the coordinator that ran them.
#
# It lies beside the file of the model, with the ledger, in `CERTIFIED`. Spec: docs/spec/privacy.md. `fedcore.signing`
# makes and checks the signature, `fedcore.privacy.verification` computes everything again.


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
