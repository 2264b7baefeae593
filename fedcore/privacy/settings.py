"""The privacy of a task and the ledger of its rounds, as data."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypeAlias

import msgspec

from fedcore.errors import PrivacyError
from fedcore.validation import Count, check, checked, demand

Mechanism: TypeAlias = Literal["gaussian", "tree", "banded", "distributed"]
"""How the sums of rounds are noised.

gaussian: by new noise in every round. tree, banded: by noise of DP-FTRL from a binary tree or a banded matrix, much of
which later rounds cancel (`fedcore.privacy.matrices`). distributed: by the devices of secure rounds, each of which adds
a share to its own report (`fedcore.privacy.skellam`).
"""
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6
"""Noise multipliers whose ε an accountant can compute: less hides nothing, and more leaves nothing to learn from."""
MOST_TREE_ROUNDS = 1024
"""The most rounds of a tree: every commit computes its sensitivity in time quadratic in the rounds."""
_demand = partial(demand, PrivacyError)
Positive = Annotated[float, msgspec.Meta(gt=0)]
WholeFromOne = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]


@checked(PrivacyError)
class Noise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The noise of a round, and assumptions about the rounds that a device is in: all that an accountant needs.

    Raises PrivacyError naming the field and what it may be.

    noise_multiplier: z, the standard deviation of the new noise on the sum of a round, over the bound on the l2 norm of
        a report; from LEAST_NOISE to MOST_NOISE.
    mechanism: how sums are noised.
    min_separation_rounds: the least number of rounds from one participation of a device to its next; 1 allows each.
    bands: diagonals of the banded matrix, from 2 to min_separation_rounds; 1 for other mechanisms.
    sampling_probability: the probability that a device is in a round, drawn anew for every device and round (Poisson
        sampling), as only a simulation can; 1 claims nothing about which devices come.
    """

    noise_multiplier: Annotated[float, msgspec.Meta(ge=LEAST_NOISE, le=MOST_NOISE)]
    mechanism: Mechanism = "gaussian"
    min_separation_rounds: WholeFromOne = 1
    bands: WholeFromOne = 1
    sampling_probability: Probability = 1.0

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

    epsilon, delta: the budget; no round starts that would exceed it.
    users: size of the population. δ is below 1 / users, because a larger δ would allow a model that reveals a person.
    """

    epsilon: Positive
    delta: Positive
    users: WholeFromOne

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

    round: its number. clip: the bound on the l2 norm of every report in it. devices: how many reports it sums.

    Only for the mechanism distributed, else 0: honest, the number of devices assumed to add their share of the noise;
    square, the bound on the squared l2 norm of a report in steps of its rounding.
    """

    round: Count
    clip: Positive
    devices: Count
    honest: Count = 0
    square: Count = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand((self.square > 0) is (self.mechanism == "distributed"), "square", "above 0 if distributed", self.square)
        _demand(self.honest <= self.devices, "honest", f"at most the devices ({self.devices})", self.honest)
