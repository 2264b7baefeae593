"""Private simulations: the noise on their sums, their cohorts, and the ε that they say."""

import dp_accounting
import numpy as np
import pytest
import torch
from scipy.stats import chi2

from fedcore.algorithms import create
from fedcore.errors import PrivacyError
from fedcore.privacy.accounting import NoiseOfRounds, coefficients, spent
from fedcore.privacy.settings import Noise
from simulator import SimulationConfig, simulate
from simulator.configuration import PrivateTraining
from simulator.datasets import load
from simulator.errors import EngineError
from simulator.private_training import Cohorts, PrivateSums, SimulatedPrivacy, promise_of
from simulator.runs.reading import read_run
from simulator.runs.running import start_run

CLIPPED = {"weighting": "uniform", "clip_norm": 0.5}
MECHANISMS = [
    {},
    {"mechanism": "tree", "min_separation_rounds": 4},
    {"mechanism": "banded", "min_separation_rounds": 4, "bands": 4},
]


def config(**values):
    base = {"model": "logreg", "rounds": 4, "cohort": 5, "engine": "torch", "processes": 1, "settings": CLIPPED}
    return SimulationConfig(**base | values)


def matrix_of(facts, rounds):
    if facts.get("mechanism") == "banded":
        return sum(c * np.eye(rounds, k=-k) for k, c in enumerate(coefficients(facts["bands"])))
    if facts.get("mechanism") == "tree":
        ends = range(1, rounds + 1)
        return np.array([[float(end - (end & -end) < i <= end) for i in ends] for end in ends])
    return np.eye(rounds)


@pytest.mark.parametrize("facts", MECHANISMS)
def test_noise_of_rounds_is_the_inverse_matrix_times_new_noise(facts):
    fresh_TM = np.random.default_rng(1).standard_normal((13, 3))
    noise = NoiseOfRounds(Noise(noise_multiplier=1.0, **facts), lambda step: fresh_TM[step - 1])
    expected_TM = np.linalg.solve(matrix_of(facts, 13), fresh_TM)
    for step in (*range(1, 14), 5, 6, 13, 1):
        np.testing.assert_allclose(noise.at(step), expected_TM[step - 1], atol=1e-12)


@pytest.mark.parametrize("facts", MECHANISMS)
def test_the_noise_of_1000_rounds_has_the_deviation_that_is_said(facts):
    privacy = SimulatedPrivacy(epsilon=1.0, delta=1e-6, users=100, noise_multiplier=2.5, **facts)
    sums, broadcast = {"delta": torch.zeros(7, dtype=torch.float64)}, {"clip": torch.tensor([0.3])}
    private = PrivateSums(privacy, seed=3)
    noisy_TM = np.array([private.mean(sums, broadcast, step, cohort=10)["delta"].numpy() for step in range(1, 1001)])
    fresh_TM = matrix_of(facts, 1000) @ noisy_TM * 10 / (2.5 * 0.3)
    statistic = float((fresh_TM**2).sum())
    assert chi2.ppf(1e-4, 7000) < statistic < chi2.ppf(1 - 1e-4, 7000)


def test_noise_is_that_of_the_seed_and_new_in_every_round():
    privacy = SimulatedPrivacy(epsilon=1.0, delta=1e-6, users=100, noise_multiplier=1.0)
    sums, broadcast = {"delta": torch.zeros(3, dtype=torch.float64)}, {"clip": torch.tensor([1.0])}

    def drawn(seed, step):
        return tuple(PrivateSums(privacy, seed).mean(sums, broadcast, step, 1)["delta"].tolist())

    assert drawn(1, 1) == drawn(1, 1)
    assert len({drawn(1, 1), drawn(1, 2), drawn(2, 1)}) == 3


def test_little_noise_and_a_huge_bound_are_uniform_fed_avg():
    plain = simulate(config(settings={"weighting": "uniform"}))
    settings = {"weighting": "uniform", "clip_norm": 100.0}
    private = simulate(config(settings=settings, privacy=PrivateTraining(noise_multiplier=1e-6, delta=1e-4)))
    assert private.test_loss == pytest.approx(plain.test_loss, rel=1e-5)
    assert (plain.epsilon, private.epsilon > 1e6) == (None, True)


@pytest.mark.parametrize("facts", MECHANISMS)
def test_a_simulation_spends_its_budget_in_its_last_round(facts, tmp_path):
    private = PrivateTraining(epsilon=3.0, delta=1e-4, **facts)
    result = start_run(tmp_path / "run", config(privacy=private, rounds=6))
    epsilons = [point["epsilon"] for point in read_run(tmp_path / "run").points]
    assert len(epsilons) == 6
    assert epsilons == sorted(epsilons)
    assert 2.99 < epsilons[-1] == result.epsilon <= 3.0


def test_poisson_cohorts_are_drawn_user_by_user_and_amplify():
    users = load("digits", clients=200)
    cohorts = [Cohorts(40, poisson=True).draw(number, users, seed=2) for number in range(1, 301)]
    counts = np.bincount(np.concatenate(cohorts), minlength=200)
    sizes = np.array([len(one) for one in cohorts])
    assert sizes.mean() == pytest.approx(40, abs=4 * np.sqrt(32 / 300))
    assert sizes.var() == pytest.approx(32, rel=0.35)
    assert chi2.ppf(1e-4, 200) < ((counts - 60) ** 2 / 48).sum() < chi2.ppf(1 - 1e-4, 200)
    asked = PrivateTraining(noise_multiplier=1.0, delta=1e-4, poisson=True)
    amplified = promise_of(asked, users=200, cohorts=Cohorts(40, poisson=True), rounds=20)
    assert amplified.sampling_probability == 0.2
    assert amplified.epsilon < 0.6 * spent([Noise(noise_multiplier=1.0)] * 20, 1e-4)


@pytest.mark.parametrize("rounds", [4, pytest.param(5, marks=pytest.mark.long)])
def test_both_trips_of_a_sampled_cohort_are_one_draw(rounds):
    facts = {"algorithm": "mime", "settings": {"clip_norm": 1.0}, "clients": 100, "cohort": 20, "same_cohort": True}
    private = PrivateTraining(noise_multiplier=2.0, delta=1e-4, poisson=True)
    result = simulate(config(**facts, rounds=rounds, privacy=private))
    probability = 20 / result.train_users
    exact, bound = dp_accounting.pld.PLDAccountant(), dp_accounting.rdp.RdpAccountant(orders=range(2, 100))
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    # Who was drawn for a pair adds √2 of the bound to both sums together.
    exact.compose(dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(2.0 / 2**0.5)), 2)
    bound.compose(dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.SelfComposedDpEvent(gaussian, 2)), 2)
    for accountant in (exact, bound) if rounds % 2 else ():
        accountant.compose(dp_accounting.PoissonSampledDpEvent(probability, gaussian))
    assert result.epsilon == pytest.approx(exact.get_epsilon(1e-4), rel=2e-3)
    assert result.epsilon < bound.get_epsilon(1e-4)


@pytest.mark.long
def test_noise_for_both_trips_of_a_sampled_cohort_spends_the_budget():
    facts = {"algorithm": "mime", "settings": {"clip_norm": 1.0}, "clients": 100, "cohort": 20, "same_cohort": True}
    private = PrivateTraining(epsilon=3.0, delta=1e-4, poisson=True)
    epsilons = []
    simulate(config(**facts, rounds=4, privacy=private), lambda _, point: epsilons.append(point["epsilon"]))
    assert epsilons == sorted(epsilons)
    assert 2.95 < epsilons[-1] <= 3.0


def test_separated_users_take_turns():
    users, last = load("digits", clients=60), {}
    cohorts = Cohorts(7, separation=5)
    for number in range(1, 41):
        chosen = cohorts.draw(number, users, seed=1)
        assert len(set(chosen)) == 7
        assert all(number - last.get(user, -5) >= 5 for user in chosen)
        last |= dict.fromkeys(chosen, number)
    assert len(last) == 60


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"settings": {}}, PrivacyError, "clipped as a whole"),
        ({"privacy": PrivateTraining(noise_multiplier=1.0, delta=0.5)}, PrivacyError, "delta must be below 1 / users"),
        ({"privacy": PrivateTraining(noise_multiplier=1.0, delta=1e-4, poisson=True)}, EngineError, "Poisson"),
        ({"compress": "subsample=0.5"}, EngineError, "keeps the length"),
        ({"baseline": "pooled"}, EngineError, "privacy is for federated"),
        ({"algorithm": "scaffold", "settings": {}}, PrivacyError, "clipped as a whole"),
        (
            {"privacy": PrivateTraining(noise_multiplier=1.0, delta=1e-4, min_separation_rounds=40)},
            EngineError,
            "40 groups that take turns",
        ),
        (
            {
                "privacy": PrivateTraining(noise_multiplier=1.0, delta=1e-4, mechanism="tree"),
                "settings": CLIPPED | {"clip_quantile": 0.5},
            },
            PrivacyError,
            "leave clip_quantile out",
        ),
    ],
)
def test_what_no_simulation_can_keep_private_is_refused(changed, error, said):
    with pytest.raises(error, match=said):
        simulate(config(**{"privacy": PrivateTraining(noise_multiplier=1.0, delta=1e-4)} | changed))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"delta": 1e-4}, "either epsilon"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "either epsilon"),
        ({"mechanism": "tree"}, "either epsilon"),
        ({"noise_multiplier": 1.0}, "delta is missing"),
    ],
)
def test_privacy_has_either_a_budget_or_a_noise_and_a_delta(parts, said):
    with pytest.raises(EngineError, match=said):
        PrivateTraining(**parts)


def test_every_round_of_an_algorithm_of_two_trips_spends():
    algorithm = create("mime", {"clip_norm": 1.0})
    private = PrivateTraining(noise_multiplier=2.0, delta=1e-4)
    result = simulate(config(algorithm=algorithm.name, settings={"clip_norm": 1.0}, privacy=private))
    assert result.epsilon == pytest.approx(spent([Noise(noise_multiplier=2.0)] * 4, 1e-4))
