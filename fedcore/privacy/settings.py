"""The privacy of a task and the ledger of its rounds, as data."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import msgspec

from fedcore.errors import PrivacyError
from fedcore.validation import Count, checked, type_error

Mechanism: TypeAlias = Literal["gaussian", "tree", "banded", "distributed"]
"""How the sums of rounds are noised.

gaussian: by noise that is new in every round. tree, banded: by noise of DP-FTRL, much of which later rounds take back,
from a binary tree or a banded matrix (`fedcore.privacy.matrices`). distributed: by the devices of secure rounds, each
of which adds a share to its own report (`fedcore.privacy.skellam`).
"""
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6
"""Noise multipliers whose ε an accountant can compute: less hides nothing, and more leaves nothing to learn from."""
Positive = Annotated[float, msgspec.Meta(gt=0)]
WholeFromOne = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]


@checked
class Noise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The noise of a round, and what is assumed of the rounds that a device is in: all that an accountant must know.

    Raises PrivacyError naming the field and what it may be.

    noise_multiplier: z, the standard deviation of the new noise on the sum of a round, over the bound on the l2 norm of
        a report; from LEAST_NOISE to MOST_NOISE.
    mechanism: how sums are noised.
    min_separation_rounds: rounds from one participation of a device to its next, at least; with 1 it may be in each.
    bands: diagonals of the banded matrix, from 2 to min_separation_rounds; 1 for other mechanisms.
    sampling_probability: with which each device is in a round, drawn anew for every device and round (Poisson
        sampling), as only a simulation can; 1 claims nothing about who comes.
    """

    noise_multiplier: Positive
    mechanism: Mechanism = "gaussian"
    min_separation_rounds: WholeFromOne = 1
    bands: WholeFromOne = 1
    sampling_probability: Probability = 1.0

    def __post_init__(self) -> None:
        wrong = type_error(self)
        if wrong:
            raise PrivacyError(f"{wrong[0]} cannot be {wrong[1]!r}: {wrong[2]}")
        allowed = f"from {LEAST_NOISE:g} to {MOST_NOISE:g}"
        within = LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE
        _demand(within, "noise_multiplier", allowed, self.noise_multiplier)
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


@checked
class Privacy(Noise, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a task promises: (ε, δ)-differential privacy for every device, and the noise by which it is kept.

    Two runs are neighbours when one device's reports are zeros in one of them. Who took part, and how many, is public.

    epsilon, delta: the budget; a round that would exceed it is not begun.
    users: size of the population. δ is below 1 / users: with more, the model might show a person whole.
    """

    epsilon: Positive
    delta: Positive
    users: WholeFromOne

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand(self.epsilon < math.inf, "epsilon", "finite", self.epsilon)
        _demand(self.delta < 1 / self.users, "delta", f"below 1 / users, which is {1 / self.users:g}", self.delta)

    @property
    def noise_of_devices(self) -> float:
        """The noise multiplier that devices must bring about, 0 where the coordinator adds the noise."""
        return self.noise_multiplier if self.mechanism == "distributed" else 0.0


@checked
class LedgerEntry(Noise, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A noised sum that was released: one row of a task's ledger.

    round: its number. clip: the bound on the l2 norm of every report in it. devices: how many reports it sums.

    Of the mechanism distributed, and else 0: honest, how many devices were counted on to add their share of the noise;
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


def _demand(holds: bool, name: str, allowed: str, value: object) -> None:
    if not holds:
        raise PrivacyError(f"{name} must be {allowed}, not {value!r}")
