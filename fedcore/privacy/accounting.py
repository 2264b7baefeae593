"""The accountant: the ε that the rounds of a ledger have spent, and the noise with which a plan stays within an ε.

Two runs are neighbours if they differ in the reports of one device, which are zeros in one of the runs. The device is
assumed to be in the worst set of rounds that the separation allows. Needs `dp-accounting` (extra `privacy`), which is
loaded on the first call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from fedcore.errors import PrivacyError
from fedcore.privacy import skellam
from fedcore.privacy.matrices import banded_sensitivity_squared, heaviest, tree_sensitivity_squared
from fedcore.privacy.settings import Noise

_ORDERS = [*range(2, 65), *(round(2 ** (eighth / 8)) for eighth in range(49, 161))]
"""Orders of Rényi divergences: whole numbers, as Skellam noise requires. A small ε needs large orders, because ε is at
least log(1 / δ) over the order; the last is 2^20."""
_GRID, _GRID_OF_DEVIATION = 1e-3, 0.1
"""The grid to which privacy losses are rounded up, and the same in standard deviations of the loss of a round. The
roundings of T rounds add T grid² / 6 to a variance of T deviation², so they raise ε by a thousandth."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A bound on what noised sums reveal of one device. The losses of several tasks add up, before ε is taken of them.

    gaussian: the squared distance by which a device moves all sums with Gaussian noise, in its standard deviations.
    Squares add up, also where each task depends on what those before it, or beside it, released (Dong, Roth, Su,
    "Gaussian differential privacy", JRSS B 2022, corollary 3.3; Smith, Thakurta, "Fully adaptive composition for
    Gaussian differential privacy", 2022). renyi: divergences of the sums with other noise, one for each of _ORDERS, or
    none. They add up too (Mironov, "Rényi differential privacy", CSF 2017, proposition 1).
    """

    gaussian: float = 0.0
    renyi: tuple[float, ...] = ()

    @classmethod
    def unbounded(cls) -> Loss:
        """That of a task without privacy."""
        return cls(math.inf)

    def __add__(self, other: Loss) -> Loss:
        both = self.renyi and other.renyi
        added = tuple(map(sum, zip(self.renyi, other.renyi, strict=True))) if both else self.renyi or other.renyi
        return Loss(self.gaussian + other.gaussian, added)

    def epsilon(self, delta: float) -> float:
        """ε at δ; infinite where nothing is bounded. Raises PrivacyError as `spent`."""
        _check_delta(delta)
        if self == Loss() or math.isinf(self.gaussian):
            return self.gaussian
        if not self.renyi:
            with np.errstate(divide="ignore"):  # of losses that are tiny or vast, the logarithm of a chance of 0
                return float(_dp_accounting().get_epsilon_gaussian(1 / math.sqrt(self.gaussian), delta))
        divergences = [order * self.gaussian / 2 + other for order, other in zip(_ORDERS, self.renyi, strict=True)]
        epsilon, _ = _dp_accounting().rdp.compute_epsilon(_ORDERS, divergences, delta)
        return float(epsilon)


def loss_of(rows: Sequence[Noise]) -> Loss:
    """The loss of released sums, as of `spent`, which are not drawn by Poisson sampling. Raises PrivacyError."""
    if not rows:
        return Loss()
    _check_alike(rows)
    if rows[0].mechanism != "distributed":
        return Loss(_moved_squared(rows))
    times = heaviest(np.ones(len(rows)), rows[0].min_separation_rounds)
    return Loss(renyi=tuple(times * skellam.divergence(rows, order) for order in _ORDERS))


def loss_of_rounds(noise: Noise, rounds: int) -> Loss:
    """The loss of so many sums with one and the same noise: `loss_of`, without a row for each. Raises PrivacyError."""
    separation = noise.min_separation_rounds
    times = -(-rounds // separation)
    if times == 0:
        return Loss()
    if noise.mechanism == "distributed":
        return Loss(renyi=tuple(times * skellam.divergence([noise], order) for order in _ORDERS))
    if noise.mechanism == "gaussian":
        squared = float(times)
    elif noise.mechanism == "tree":
        squared = tree_sensitivity_squared(rounds, separation)
    else:
        squared = banded_sensitivity_squared(noise.bands, min(rounds, separation), separation) * (times - 1)
        squared += banded_sensitivity_squared(noise.bands, rounds - (times - 1) * separation, separation)
    return Loss(squared / noise.noise_multiplier**2)


def spent(rows: Sequence[Noise], delta: float) -> float:
    """ε at δ of released sums, with the rows in the order of release; 0 without rows.

    Every row counts as a round for the separation. Raises PrivacyError when rows differ in more than the noise
    multiplier, when they differ in it although noise is correlated over rounds, and when `dp-accounting` is missing.
    """
    _check_delta(delta)
    if not rows:
        return 0.0
    _check_alike(rows)
    if rows[0].sampling_probability < 1:
        return _spent_by_samples(rows, delta)
    return loss_of(rows).epsilon(delta)


def calibrated(noise: Noise, rounds: int, epsilon: float, delta: float) -> float:
    """The least noise multiplier with which `rounds` rounds of such noise spend at most ε at δ.

    The noise multiplier of `noise` itself does not matter. Noise of devices is assumed to have infinitely fine steps,
    except in a ledger's row, which has their size. Raises PrivacyError as `spent` does.
    """
    unit = msgspec.structs.replace(noise, noise_multiplier=1.0)
    if noise.sampling_probability == 1 and noise.mechanism != "distributed":
        sigma = _dp_accounting().get_sigma_gaussian(epsilon, delta)
        return float(sigma) * math.sqrt(_moved_squared([unit] * rounds)) * (1 + 1e-9)
    low, high = 0.1, 1.0
    while spent([msgspec.structs.replace(unit, noise_multiplier=high)] * rounds, delta) > epsilon:
        low, high = high, 2 * high
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        fits = spent([msgspec.structs.replace(unit, noise_multiplier=middle)] * rounds, delta) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return high


def _moved_squared(rows: Sequence[Noise]) -> float:
    """The squared distance by which a device can move all sums together, in standard deviations of their noise."""
    first, rounds = rows[0], len(rows)
    if first.mechanism == "gaussian":
        return heaviest(np.array([row.noise_multiplier**-2 for row in rows]), first.min_separation_rounds)
    if first.mechanism == "tree":
        squared = tree_sensitivity_squared(rounds, first.min_separation_rounds)
    else:
        squared = banded_sensitivity_squared(first.bands, rounds, first.min_separation_rounds)
    return squared / first.noise_multiplier**2


def _spent_by_samples(rows: Sequence[Noise], delta: float) -> float:
    """ε with Poisson sampling: privacy loss distributions composed."""
    accounting, counts = _dp_accounting(), Counter((row.noise_multiplier, row.sampling_probability) for row in rows)
    variance = sum(
        count * probability**2 * math.expm1(min(multiplier**-2, 50.0))
        for (multiplier, probability), count in counts.items()
    )
    grid = min(_GRID, _GRID_OF_DEVIATION * math.sqrt(variance / len(rows)))
    accountant = accounting.pld.PLDAccountant(value_discretization_interval=grid)
    for (multiplier, probability), count in counts.items():
        sampled = accounting.PoissonSampledDpEvent(probability, accounting.GaussianDpEvent(multiplier))
        accountant.compose(sampled, count)
    return float(accountant.get_epsilon(delta))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must be above 0 and below 1, not {delta!r}")


def _check_alike(rows: Sequence[Noise]) -> None:
    free = {"noise_multiplier", "sampling_probability"} if rows[0].mechanism == "gaussian" else set()
    for name in Noise.__struct_fields__:
        values = {getattr(row, name) for row in rows}
        if name not in free and len(values) > 1:
            raise PrivacyError(f"rows of one ledger have the same {name}, and these have {sorted(values)}")
    if len({row.sampling_probability < 1 for row in rows}) > 1:
        raise PrivacyError("rows of one ledger are all drawn by Poisson sampling or none is")


def _dp_accounting() -> Any:
    try:
        import dp_accounting  # the import takes a second, and only private training needs it
    except ModuleNotFoundError as error:
        raise PrivacyError("dp-accounting is not installed: pip install 'muster-fl[privacy]'") from error
    return dp_accounting
