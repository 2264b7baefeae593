"""An audit of private training, a lower bound on its ε; and the cost of privacy in accuracy.

Canaries are made-up reports of the greatest allowed length, each in a direction of its own. A coin decides for each
whether it is added to the sums. From all noisy sums the audit then guesses which ones were added. No guess can be
better than ε allows, so good guesses show that the noise is weaker than claimed.

* `lower_bound`: Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023, Algorithm 1 and
  Theorem 5.2. It holds with a confidence of 95 %, whatever the mechanism.
* `estimate`: Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, "One-shot empirical privacy estimation for federated
  learning", ICLR 2024: ε of the Gaussian whose mean is as far from 0 as the scores of canaries that are in lie from
  those of the others, in standard deviations. It is near the claim where the noise is as claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fedcore.privacy.accounting import Deployment, MechanismPlan, matrix, spent
from fedcore.privacy.settings import Noise
from simulator import datasets
from simulator.configuration import HELD_OUT, SimulationConfig
from simulator.engines.memory import one_thread
from simulator.errors import EngineError
from simulator.private_training import Cohorts, PrivateSums, SimulatedPrivacy, promise_of
from simulator.simulation import training_on
from simulator.training import overall

CONFIDENCE = 0.95
GUESSED = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of the canaries to guess, the most certain first. The bound is the best over these shares, which divide the
doubt equally."""


class Canaries:
    """Made-up reports of unit length, orthogonal to each other: each has values ±c at places of its own.

    included: bool (K,), which of them are added to the sums of rounds.
    """

    def __init__(self, count: int, size: int, rounds: int, separation: int, seed: int) -> None:
        if not 2 <= count <= size:
            raise EngineError(f"canaries need places of their own: there may be 2 to {size:,} of them, not {count:,}")
        random = np.random.default_rng([seed, count])
        self.included = random.random(count) < 0.5
        self._owner = random.permutation(np.arange(size) % count)
        values = random.choice([-1.0, 1.0], size)
        self._values = values / np.sqrt(np.bincount(self._owner, minlength=count))[self._owner]
        self.takes_part = np.arange(rounds) % separation == 0
        self._seen: list[NDArray[np.float64]] = []

    def added(self, number: int) -> NDArray[np.float64]:
        """What canaries add to the sum of a round, from 1, in units of the bound: (size,)."""
        added: NDArray[np.float64] = self._values * (self.included[self._owner] & self.takes_part[number - 1])
        return added

    def see(self, noisy: NDArray[np.float64]) -> None:
        """Keep the component of a noisy sum, in units of the bound, along every canary."""
        along = np.bincount(self._owner, self._values * noisy, minlength=len(self.included))
        self._seen.append(along.astype(np.float64))

    def scores(self, noise: Noise) -> NDArray[np.float64]:
        """The likelihood that a canary was added, up to a scale: (K,). Correlated noise is undone first."""
        matrix_TT = matrix(noise, len(self._seen))
        response_T = matrix_TT @ self.takes_part[: len(self._seen)]
        scores: NDArray[np.float64] = response_T @ (matrix_TT @ np.array(self._seen)) / np.linalg.norm(response_T)
        return scores


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of an audit. claimed: ε at δ by the accountant. guesses, right: those that gave the bound.

    estimate_at_least: the lower end of the estimate's confidence interval. Both assume normally distributed scores.
    """

    claimed: float
    delta: float
    estimate: float
    estimate_at_least: float
    lower_bound: float
    guesses: int
    right: int
    canaries: int
    noise_multiplier: float
    rounds: int

    @property
    def holds(self) -> bool:
        """Whether neither bound refutes the claim."""
        return max(self.lower_bound, self.estimate_at_least) <= self.claimed


class AuditedSums(PrivateSums):
    """The sums of rounds with canaries. noise: whether the claimed noise is added."""

    def __init__(self, privacy: SimulatedPrivacy, seed: int, make: Callable[[int], Canaries], *, noise: bool) -> None:
        super().__init__(privacy, seed)
        self._make, self._noisy = make, noise
        self.canaries: Canaries | None = None

    def noisy(self, total: NDArray[np.float64], number: int) -> NDArray[np.float64]:
        """The sum with canaries, and with the noise if it is there, in units of the bound."""
        self.canaries = self.canaries or self._make(len(total))
        planted = total + self.canaries.added(number)
        seen = super().noisy(planted, number) if self._noisy else planted
        self.canaries.see(seen)
        return seen


@one_thread()
def audit(config: SimulationConfig, canaries: int, *, noisy: bool = True) -> AuditResult:
    """Train as a private simulation does, with canaries, and guess which were added.

    noisy: whether the claimed noise is added; without it the audit must refute the claim. Raises EngineError unless the
    simulation is private and has neither Poisson sampling nor masks.
    """
    if not config.privacy.asked or config.privacy.poisson or config.secagg is not None:
        raise EngineError("an audit needs a private simulation without Poisson sampling and masks")
    users = datasets.load(config.dataset, config.data, columns=config.columns).split(config.held_out, config.seed)
    promise = promise_of(config.privacy, len(users[0]), Cohorts(config.cohort), config.rounds)

    def make(size: int) -> Canaries:
        return Canaries(canaries, size, config.rounds, promise.min_separation_rounds, config.seed)

    private = AuditedSums(promise, config.seed, make, noise=noisy)
    training = training_on(users, config, private)
    for number in range(1, config.rounds + 1):
        training.run_round(number)
    if private.canaries is None:
        raise EngineError("no round was run")
    scores, included = private.canaries.scores(promise), private.canaries.included
    middle, least = estimate(scores, included, promise.delta)
    bound, guesses, right = lower_bound(scores, included, promise.delta)
    return AuditResult(
        claimed=promise.spent(config.rounds),
        delta=promise.delta,
        estimate=middle,
        estimate_at_least=least,
        lower_bound=bound,
        guesses=guesses,
        right=right,
        canaries=canaries,
        noise_multiplier=promise.noise_multiplier,
        rounds=config.rounds,
    )


def estimate(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float) -> tuple[float, float]:
    """ε of the Gaussian mechanism that separates scores equally well, and the lower end of its confidence interval.

    Where scores are m standard deviations apart, m is off by √(4 / K + m² / 2K) from K canaries.
    """
    inside, outside = scores[included], scores[~included]
    spread = math.sqrt((inside.var(ddof=1) + outside.var(ddof=1)) / 2)
    moved = float(inside.mean() - outside.mean()) / max(spread, 1e-300)
    error = math.sqrt((4 + moved**2 / 2) / len(scores))
    least = moved - NormalDist().inv_cdf(CONFIDENCE) * error
    middle, low = (spent([Noise(noise_multiplier=1 / mean)], delta) if mean > 0 else 0.0 for mean in (moved, least))
    return middle, low


def lower_bound(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float) -> tuple[float, int, int]:
    """The best bound from guessing that the highest scores were added, the lowest not; the guesses; those right."""
    order, doubt = np.argsort(-scores), (1 - CONFIDENCE) / len(GUESSED)
    bounds = []
    for share in GUESSED:
        half = max(1, int(share * len(scores) / 2))
        right = int(included[order[:half]].sum() + (~included[order[-half:]]).sum())
        bounds.append((_least_epsilon(len(scores), 2 * half, right, delta, doubt), 2 * half, right))
    return max(bounds)


def _least_epsilon(canaries: int, guesses: int, right: int, delta: float, doubt: float) -> float:
    """The least ε under which so many right guesses have a probability above `doubt`."""
    low, high = 0.0, 1.0
    if _chance(canaries, guesses, right, low, delta) > doubt:
        return 0.0
    while high < 64 and _chance(canaries, guesses, right, high, delta) <= doubt:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(canaries, guesses, right, middle, delta) <= doubt else (low, middle)
    return low


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The probability that a mechanism of (ε, δ) allows so many right guesses, at most (Theorem 5.2)."""
    from scipy.stats import binom  # it comes with the extra `privacy`

    each = 1 / (1 + math.exp(-epsilon))
    exactly = binom.pmf(np.arange(right - 1, -1, -1), guesses, each)
    slack = float((np.cumsum(exactly) / np.arange(1, right + 1)).max()) if right else 0.0
    return float(min(1.0, binom.sf(right - 1, guesses, each) + slack * delta * 2 * canaries))


CLIPPED = {"weighting": "uniform", "clip_norm": 0.5}


def stand_in(planned: Deployment, way: MechanismPlan, cohort: int) -> SimulatedPrivacy:
    """The noise that makes the mean of a cohort of this size as noisy as that of the planned cohort."""
    return SimulatedPrivacy(
        epsilon=planned.epsilon,
        delta=planned.delta,
        users=planned.population,
        noise_multiplier=way.noise_multiplier * cohort / planned.cohort,
        mechanism=way.mechanism,
        bands=way.bands,
        min_separation_rounds=planned.min_separation_rounds,
    )


@one_thread()
def accuracy_of(
    planned: Deployment,
    way: MechanismPlan | None,
    model: str,
    dataset: str,
    data: Path | None,
    settings: Mapping[str, object],
) -> float:
    """The accuracy on held-out users of FedAvg after the rounds of the plan, with the noise of `way` or without any.

    settings: override those of CLIPPED. Cohorts are as large as planned, or as the number of users allows. The noise on
    a round's mean is that of the plan in any case; only the variance between cohorts is larger.
    """
    users = datasets.load(dataset, data).split(HELD_OUT, seed=0)
    cohort = min(planned.cohort, len(users[0]))
    config = SimulationConfig(
        model=model, dataset=dataset, data=data, settings=CLIPPED | dict(settings), rounds=planned.rounds, cohort=cohort
    )
    private = None
    if way is not None:
        private = PrivateSums(stand_in(planned, way, cohort), seed=0)
    training = training_on(users, config, private)
    for number in range(1, planned.rounds + 1):
        training.run_round(number)
    per_user = training.measure(planned.rounds)
    if "accuracy" not in per_user:
        raise EngineError(f"the model {model} has no metric accuracy, by which the cost could be told")
    return overall(per_user["accuracy"], training.test)
