"""The accountant: the ε that rounds have spent, the noise that a budget needs, and matrices and noise of DP-FTRL.

Two runs are neighbours if they differ in the reports of one device, which are zeros in one of the runs. The device is
assumed to be in the worst set of rounds that the separation allows. Needs `dp-accounting` (extra `privacy`), which is
loaded on the first call.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.algorithms.clipped import Clipped
from fedcore.errors import PrivacyError
from fedcore.privacy.settings import MOST_TREE_ROUNDS, LedgerEntry, Mechanism, Noise, Privacy

# Matrices of DP-FTRL: how the noise of rounds is correlated, and how far a device can move the noised sums.
#
# Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep) learning without sampling or shuffling",
# ICML 2021; Denisov, McMahan, Rush, Smith, Thakurta, "Improved differential privacy for SGD via optimal private linear
# operators on adaptive streams", NeurIPS 2022; Choquette-Choo et al., "Multi-epoch matrix factorization mechanisms for
# private machine learning", ICML 2023. Of T rounds, with new noise z ζ_t of each, the noise that round t gets is
#
#     w_t = z (C⁻¹ ζ)_t        C lower triangular (T, T), so that w_t takes ζ_1 … ζ_t
#
# A device whose reports have norm 1 at most moves C x by no more than the sensitivity of C, so all T noised sums
# together are one Gaussian mechanism of noise multiplier z / sensitivity, however reports depend on earlier sums.
#
#     gaussian    C = I
#     tree        C[t, i] = 1 where i is in the block of 2^l rounds that ends at t, 2^l the lowest bit of t
#     banded      C[t, i] = c_{t−i}, c_0 = 1, c_k = c_{k−1} (2k − 1) / 2k below `bands`, else 0: the matrix square root
#                 of prefix sums, cut off (Kalinin, Lampert, "Banded square root matrix factorization for
#                 differentially private model training", NeurIPS 2024)

Floats = NDArray[np.float64]


def coefficients(bands: int) -> Floats:
    """c_0 … of the banded matrix, float64 (bands,)."""
    k = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


def block(step: int) -> int:
    """The number of rounds in the tree's block that ends at a step, which counts from 1."""
    return step & -step


def inverse_row(mechanism: Mechanism, bands: int, step: int) -> dict[int, float]:
    """The row of C⁻¹ for a step from 1: the weights of ζ_1 … ζ_step in w_step, by step, without those that are 0."""
    if mechanism == "gaussian":
        return {step: 1.0}
    if mechanism == "tree":
        # The block that ends at the step is the step itself and the blocks that end before it, within.
        row, before, first = {step: 1.0}, step - 1, step - block(step)
        while before > first:
            row[before] = -1.0
            before -= block(before)
        return row
    # C is Toeplitz, and so is C⁻¹: the power series 1 / Σ c_k x^k.
    c, series = coefficients(bands), np.zeros(step)
    series[0] = 1.0
    for k in range(1, step):
        width = min(k, bands - 1)
        series[k] = -c[1 : width + 1] @ series[k - width : k][::-1]
    return {step - k: float(weight) for k, weight in enumerate(series) if weight}


def matrix(noise: Noise, rounds: int) -> Floats:
    """C of T = `rounds` rounds, (T, T)."""
    if noise.mechanism == "gaussian":
        return np.eye(rounds)
    if noise.mechanism == "tree":
        ends = range(1, rounds + 1)
        return np.array([[float(end - block(end) < earlier <= end) for earlier in ends] for end in ends])
    return np.sum([tap * np.eye(rounds, k=-k) for k, tap in enumerate(coefficients(noise.bands))], axis=0)  # type: ignore[no-any-return]


def banded_sensitivity_squared(bands: int, rounds: int, separation: int) -> float:
    """Squared sensitivity of the banded matrix, if a device's rounds are `separation` ≥ bands apart, so that their
    columns share no row.
    """
    lengths = np.minimum(bands, np.arange(rounds, 0, -1))
    return heaviest(np.cumsum(coefficients(bands) ** 2)[lengths - 1], separation)


def tree_sensitivity_squared(rounds: int, separation: int) -> float:
    """Squared sensitivity of the tree's matrix: an upper bound, exact for one participation and if all are alike.

    For the rounds P of a device it is the sum over i, j in P of the blocks with both i and j in them. That is bounded
    by the greatest sum over i of the greatest sum over j. Raises PrivacyError above MOST_TREE_ROUNDS.
    """
    if rounds > MOST_TREE_ROUNDS:
        raise PrivacyError(f"the mechanism tree is for at most {MOST_TREE_ROUNDS} rounds, not {rounds}: take banded")
    shared_TT = np.zeros((rounds, rounds))
    for end in range(1, rounds + 1):
        rows = slice(end - block(end), end)
        shared_TT[rows, rows] += 1
    apart_TT = np.abs(np.subtract.outer(np.arange(rounds), np.arange(rounds)))
    shared_TT[(apart_TT > 0) & (apart_TT < separation)] = 0
    return heaviest(heaviest_rows(shared_TT, separation), separation)


def heaviest(weights_T: Floats, separation: int) -> float:
    """The greatest sum of weights ≥ 0 whose places are at least `separation` apart."""
    return float(heaviest_rows(weights_T[None], separation)[0])


def heaviest_rows(weights_NT: Floats, separation: int) -> Floats:
    """`heaviest` of every row, (N,)."""
    count, rounds = weights_NT.shape
    best = np.zeros((rounds + 1, count))
    for t in range(1, rounds + 1):
        best[t] = np.maximum(best[t - 1], best[max(t - separation, 0)] + weights_NT[:, t - 1])
    return best[rounds]


# Skellam noise of devices: what a sum of whole numbers reveals about one device, as a Rényi divergence.
#
# Agarwal, Kairouz, Liu, "The Skellam mechanism for differentially private federated learning", NeurIPS 2021, Theorem
# 3.5: with noise of variance μ on every whole number, reports whose l1 and l2 norms are at most Δ₁ and Δ₂, and every
# whole order α ≥ 2
#
#     D_α ≤ α Δ₂² / 2μ + min(((2α − 1) Δ₂² + 6 Δ₁) / 4μ², 3 Δ₁ / 2μ)
#
# Here μ = z² Δ₂², as devices draw their shares (`secagg.masking`), and Δ₁ ≤ Δ₂², because a whole number is not above
# its square.


def divergence(rows: Sequence[Noise], order: int) -> float:
    """The greatest Rényi divergence of a whole order between one of these sums with a report and with zeros instead.

    rows: all of one noise multiplier. A plan does not know how reports are rounded, so its rows have infinitely fine
    steps; those of a ledger have their size.
    """
    inverse = rows[0].noise_multiplier ** -2
    squares = [row.square for row in rows if isinstance(row, LedgerEntry)]
    coarse = min((2 * order + 5) * inverse**2 / (4 * min(squares)), 1.5 * inverse) if squares else 0.0
    return order * inverse / 2 + coarse


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
    return Loss(renyi=tuple(times * divergence(rows, order) for order in _ORDERS))


def loss_of_rounds(noise: Noise, rounds: int) -> Loss:
    """The loss of so many sums with one and the same noise: `loss_of`, without a row for each. Raises PrivacyError."""
    separation = noise.min_separation_rounds
    times = -(-rounds // separation)
    if times == 0:
        return Loss()
    if noise.mechanism == "distributed":
        return Loss(renyi=tuple(times * divergence([noise], order) for order in _ORDERS))
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


# Noise that is correlated over rounds, and the check that an algorithm's sums may have it.


class NoiseOfRounds:
    """The noise w_1, w_2, … of rounds (fedcore/privacy/accounting.py), in units of z times the bound on a report.

    draw: draw(step) is ζ of a step from 1, (M,) of standard normal numbers; equal steps give equal numbers. A banded
    matrix keeps the noise of its last `bands` − 1 rounds. When asked for a step other than the next, it computes the
    noise of all rounds again.
    """

    def __init__(self, noise: Noise, draw: Callable[[int], Floats]) -> None:
        self._noise, self._draw = noise, draw
        self._taps = coefficients(noise.bands)[1:]
        self._last: deque[Floats] = deque(maxlen=noise.bands - 1)
        self._step = 0

    def at(self, step: int) -> Floats:
        """w of a step from 1, (M,)."""
        if self._noise.mechanism != "banded":
            row = inverse_row(self._noise.mechanism, self._noise.bands, step)
            summed: Floats = np.sum([weight * self._draw(earlier) for earlier, weight in row.items()], axis=0)
            return summed
        if step != self._step + 1:
            self._last.clear()
            self._step = 0
        while self._step < step:
            self._step += 1
            noise = self._draw(self._step)
            for tap, earlier in zip(self._taps, self._last, strict=False):
                noise = noise - tap * earlier
            self._last.appendleft(noise)
        return noise


def check_private(noise: Noise, algorithm: Algorithm) -> None:
    """Raise PrivacyError, saying what to change, unless the algorithm's sums may have the noise."""
    if not isinstance(algorithm, Clipped):
        raise PrivacyError(
            f"privacy needs reports that are clipped as a whole, and those of {algorithm.name} are not: set "
            "weighting=uniform and clip_norm"
        )
    if noise.mechanism == "gaussian":
        return
    if algorithm.clipping.clip_quantile:
        raise PrivacyError(
            f"with the mechanism {noise.mechanism} noise must have one size in all rounds: leave clip_quantile out, or "
            "take the mechanism gaussian"
        )
    if noise.mechanism == "distributed":
        return
    if len(trips_of(algorithm)) > 1:
        raise PrivacyError(
            f"with the mechanism {noise.mechanism} a round takes back noise of the rounds before it, and those of "
            f"{algorithm.name} sum other vectors: take the mechanism gaussian"
        )
