"""Plans of private training: the noise that a budget needs under each mechanism, and its effect on the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedcore.privacy.accounting import calibrated
from fedcore.privacy.matrices import inverse_row
from fedcore.privacy.settings import Mechanism, Noise, Privacy


@dataclass(frozen=True, slots=True)
class Deployment:
    """The planned training: a number of rounds, each with a number of devices of a population, within ε at δ.

    min_separation_rounds: the least number of rounds from one participation of a device to its next.
    """

    population: int
    cohort: int
    rounds: int
    epsilon: float
    delta: float
    min_separation_rounds: int = 1


@dataclass(frozen=True, slots=True)
class MechanismPlan:
    """A mechanism with the noise that it needs.

    round_noise: standard deviation of the noise on a value of a round's mean, in units of the bound on a report.
    model_noise: the same for the noise of all rounds together, as it is in plain FedAvg's model after the last round.
    """

    mechanism: Mechanism
    bands: int
    noise_multiplier: float
    round_noise: float
    model_noise: float


def ways(planned: Deployment) -> list[MechanismPlan]:
    """Every mechanism that the deployment may use, sorted by the noise in the model. Raises PrivacyError."""
    plans = [_way(planned, "gaussian", 1), _way(planned, "tree", 1)]
    most = min(planned.min_separation_rounds, planned.rounds)
    widths = {min(2**power, most) for power in range(1, most.bit_length() + 1)} - {1}
    if widths:
        plans.append(min((_way(planned, "banded", bands) for bands in widths), key=lambda way: way.model_noise))
    return sorted(plans, key=lambda way: way.model_noise)


def _way(planned: Deployment, mechanism: Mechanism, bands: int) -> MechanismPlan:
    promise = Privacy(
        epsilon=planned.epsilon,
        delta=planned.delta,
        users=planned.population,
        noise_multiplier=1.0,
        mechanism=mechanism,
        bands=bands,
        min_separation_rounds=planned.min_separation_rounds,
    )
    multiplier = calibrated(promise, planned.rounds, planned.epsilon, planned.delta)
    single = multiplier * math.sqrt(sum(entry**2 for entry in inverse_row(mechanism, bands, planned.rounds).values()))
    together = multiplier * _deviation_of_all(promise, planned.rounds)
    return MechanismPlan(mechanism, bands, multiplier, single / planned.cohort, together / planned.cohort)


def _deviation_of_all(noise: Noise, rounds: int) -> float:
    """The standard deviation of w_1 + … + w_T, in units of z times the bound."""
    if noise.mechanism == "gaussian":
        return math.sqrt(rounds)
    if noise.mechanism == "tree":
        return math.sqrt(rounds.bit_count())  # one block for each bit is in the sum of all rounds
    row = inverse_row("banded", noise.bands, rounds)
    series = np.array([row.get(rounds - k, 0.0) for k in range(rounds)])
    return float(np.linalg.norm(np.cumsum(series)))
