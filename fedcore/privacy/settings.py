"""The privacy of a task and the ledger of its rounds, as data."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypeAlias

import msgspec

from fedcore.errors import PrivacyError
from fedcore.validation import Count, check, checked, demand, setting

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

    honest and square are 0 unless devices add the noise.
    """

    round: Annotated[Count, setting("Number of the round.")]
    clip: Annotated[Positive, setting("Bound on the L2 norm of every report in it.")]
    devices: Annotated[Count, setting("Reports that it sums.")]
    honest: Annotated[Count, setting("Devices assumed to add their share of the noise.")] = 0
    square: Annotated[Count, setting("Bound on the squared L2 norm of a report, in steps of its rounding.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand((self.square > 0) is (self.mechanism == "distributed"), "square", "above 0 if distributed", self.square)
        _demand(self.honest <= self.devices, "honest", f"at most the devices ({self.devices})", self.honest)
