"""Privacy: what is spent, what a certificate says, and the noise of devices' sums."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys

import dp_accounting
import msgspec
import numpy as np
import pytest
from scipy.special import ive

from fedcore.errors import PrivacyError
from fedcore.privacy import accounting, settings
from fedcore.privacy.verification import verify
from fedcore.signing import SigningKey

DELTA = 1e-5


def rows(count, multiplier=1.0, **facts):
    return [settings.Noise(noise_multiplier=multiplier, **facts)] * count


def delta_of(epsilon, moved):
    """δ of a Gaussian moved by so many standard deviations (Balle, Wang, ICML 2018, Theorem 8)."""

    def below(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return below(moved / 2 - epsilon / moved) - math.exp(epsilon) * below(-moved / 2 - epsilon / moved)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_a_delta_that_is_no_probability_is_refused(delta):
    with pytest.raises(PrivacyError, match="delta"):
        accounting.spent(rows(1), delta)


def test_an_empty_ledger_has_spent_nothing():
    assert accounting.spent([], DELTA) == 0


@pytest.mark.parametrize(("count", "multiplier"), [(1, 1.0), (100, 10.0), (64, 4.0), (1000, 20.0)])
def test_gaussian_rounds_without_amplification_are_one_gaussian(count, multiplier):
    assert delta_of(accounting.spent(rows(count, multiplier), DELTA), math.sqrt(count) / multiplier) == pytest.approx(
        DELTA
    )


def test_rounds_with_different_noise_add_their_inverse_squares():
    different = rows(10, 5.0) + rows(20, 8.0)
    assert delta_of(accounting.spent(different, DELTA), math.sqrt(10 / 25 + 20 / 64)) == pytest.approx(DELTA)


def test_separation_counts_the_worst_rounds_that_a_device_may_be_in():
    # Of three rounds two apart at most, a device is in the first and the last, or in the one with the least noise.
    noises = [settings.Noise(noise_multiplier=z, min_separation_rounds=2) for z in (4.0, 2.0, 4.0)]
    assert accounting.spent(noises, DELTA) == pytest.approx(accounting.spent(rows(1, 2.0), DELTA))
    noises = [settings.Noise(noise_multiplier=z, min_separation_rounds=2) for z in (4.0, 3.5, 4.0)]
    assert accounting.spent(noises, DELTA) == pytest.approx(accounting.spent(rows(2, 4.0), DELTA))


def patterns(rounds, separation):
    for size in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield list(chosen)


def moved_squared(matrix_TT, separation):
    return max(float((matrix_TT[:, chosen].sum(1) ** 2).sum()) for chosen in patterns(len(matrix_TT), separation))


def tree_matrix(rounds):
    matrix_TT = np.zeros((rounds, rounds))
    for end in range(1, rounds + 1):
        matrix_TT[end - 1, end - accounting.block(end) : end] = 1
    return matrix_TT


@pytest.mark.parametrize("rounds", [1, 2, 5, 8, 11])
@pytest.mark.parametrize("separation", [2, 3, 4, 20])
def test_the_banded_matrix_moves_as_far_as_the_worst_participation(rounds, separation):
    for bands in range(2, separation + 1):
        taps = accounting.coefficients(bands)
        matrix_TT = sum(c * np.eye(rounds, k=-k) for k, c in enumerate(taps))
        assert accounting.banded_sensitivity_squared(bands, rounds, separation) == pytest.approx(
            moved_squared(matrix_TT, separation)
        )


@pytest.mark.parametrize("rounds", [1, 2, 5, 8, 11, 12])
@pytest.mark.parametrize("separation", [1, 2, 3, 4, 20])
def test_the_tree_moves_no_further_than_its_bound(rounds, separation):
    worst = moved_squared(tree_matrix(rounds), separation)
    bound = accounting.tree_sensitivity_squared(rounds, separation)
    assert worst <= bound + 1e-9
    assert bound <= 1.1 * worst
    if separation >= rounds:
        assert bound == math.floor(math.log2(rounds)) + 1


def test_the_banded_matrix_is_the_root_of_prefix_sums():
    taps = accounting.coefficients(50)
    np.testing.assert_allclose(np.convolve(taps, taps)[:50], 1)


def test_a_tree_for_one_epoch_spends_what_dp_accounting_says():
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(5.0, 64))
    theirs = accountant.get_epsilon(DELTA)
    ours = accounting.spent(rows(64, 5.0, mechanism="tree", min_separation_rounds=64), DELTA)
    assert ours <= theirs <= 1.1 * ours  # theirs goes by Rényi divergences, ours is exact


def test_poisson_samples_spend_less_than_renyi_divergences_say():
    accountant = dp_accounting.rdp.RdpAccountant()
    sampled = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
    theirs = accountant.compose(sampled, 1000).get_epsilon(DELTA)
    assert 0.85 * theirs <= accounting.spent(rows(1000, 1.0, sampling_probability=0.01), DELTA) <= theirs


@pytest.mark.parametrize(
    ("multiplier", "probability", "count", "delta"),
    [(4.0, 0.001, 10_000, 1e-6), (2.0, 0.001, 20_000, 1e-6), (10.0, 0.01, 10_000, 1e-5), (20.0, 0.1, 1000, 1e-5)],
)
def test_poisson_samples_spend_what_a_grid_ten_times_finer_finds(multiplier, probability, count, delta):
    # A grid may only round up, and its roundings add up over rounds.
    finest = min(1e-4, 0.01 * probability * math.sqrt(math.expm1(multiplier**-2)))
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=finest)
    sampled = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(multiplier))
    theirs = accountant.compose(sampled, count).get_epsilon(delta)
    ours = accounting.spent(rows(count, multiplier, sampling_probability=probability), delta)
    assert 0.999 * theirs <= ours <= 1.003 * theirs


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0])
def test_small_budgets_have_little_more_noise_of_devices_than_gaussian(epsilon):
    of_devices = accounting.calibrated(settings.Noise(noise_multiplier=1.0, mechanism="distributed"), 10, epsilon, 1e-6)
    gaussian = accounting.calibrated(settings.Noise(noise_multiplier=1.0), 10, epsilon, 1e-6)
    assert gaussian < of_devices < 1.25 * gaussian


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"min_separation_rounds": 7},
        {"mechanism": "tree", "min_separation_rounds": 30},
        {"mechanism": "banded", "min_separation_rounds": 20, "bands": 8},
    ],
)
def test_calibrated_noise_spends_the_budget_and_less_exceeds_it(facts):
    noise = settings.Noise(noise_multiplier=1.0, **facts)
    multiplier = accounting.calibrated(noise, 100, 2.0, DELTA)
    assert 1.999 <= accounting.spent(rows(100, multiplier, **facts), DELTA) <= 2.0
    assert accounting.spent(rows(100, multiplier * 0.999, **facts), DELTA) > 2.0


def test_rows_that_are_not_of_one_ledger_are_refused():
    with pytest.raises(PrivacyError, match="min_separation_rounds, and these have \\[1, 2\\]"):
        accounting.spent(rows(1) + rows(1, min_separation_rounds=2), DELTA)
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        accounting.spent(rows(1, 1.0, mechanism="tree") + rows(1, 2.0, mechanism="tree"), DELTA)
    with pytest.raises(PrivacyError, match="Poisson"):
        accounting.spent(rows(1) + rows(1, sampling_probability=0.5), DELTA)


def test_a_missing_accountant_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(PrivacyError, match="muster-fl\\[privacy\\]"):
        accounting.spent(rows(1), DELTA)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"delta": 0.001}, "delta must be below 1 / users, which is 0.001, not 0.001"),
        ({"delta": 0.0}, "delta"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon must be a number above 0, not inf"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": 1e-200}, "noise_multiplier must be a number from 1e-06 to 1,000,000, not 1e-200"),
        ({"noise_multiplier": 1e200}, "noise_multiplier must be a number from 1e-06 to 1,000,000, not 1e\\+200"),
        ({"users": 0}, "users"),
        ({"mechanism": "laplace"}, "mechanism"),
        ({"bands": 2}, "bands must be 1 for the mechanism gaussian, not 2"),
        ({"mechanism": "banded"}, "bands must be from 2 to min_separation_rounds"),
        ({"mechanism": "banded", "bands": 5, "min_separation_rounds": 4}, "bands"),
        ({"sampling_probability": 0.1, "min_separation_rounds": 2}, "sampling_probability"),
        ({"sampling_probability": 0.1, "mechanism": "tree"}, "sampling_probability"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused_by_its_field(wrong, said):
    good = {"epsilon": 2.0, "delta": 1e-5, "noise_multiplier": 1.0, "users": 1000}
    settings.Privacy(**good)
    with pytest.raises(PrivacyError, match=said):
        settings.Privacy(**(good | wrong))


@pytest.mark.parametrize("facts", [{}, {"mechanism": "tree"}, {"mechanism": "banded", "bands": 2}])
@pytest.mark.parametrize("multiplier", [settings.LEAST_NOISE, settings.MOST_NOISE])
def test_the_least_and_the_most_noise_have_an_epsilon(multiplier, facts):
    given = rows(3, multiplier, min_separation_rounds=2, **facts)
    assert 0 <= accounting.spent(given, DELTA) < math.inf


@pytest.mark.parametrize("multiplier", [settings.LEAST_NOISE, settings.MOST_NOISE])
def test_the_least_and_the_most_noise_of_devices_have_an_epsilon(multiplier):
    facts = {"mechanism": "distributed", "round": 1, "clip": 1.0, "devices": 5, "honest": 5, "square": 2**40}
    assert 0 <= accounting.spent([settings.LedgerEntry(noise_multiplier=multiplier, **facts)], DELTA) < math.inf


def test_a_row_of_the_ledger_survives_json():
    entry = settings.LedgerEntry(round=3, clip=0.5, devices=20, noise_multiplier=1.5, min_separation_rounds=4)
    assert msgspec.json.decode(msgspec.json.encode(entry), type=settings.LedgerEntry) == entry


MODEL = b"a model"


@pytest.fixture
def wrong(tmp_path):
    """What is wrong with a ledger, (round, clip) of each row, that its coordinator signed; first words only."""
    key = SigningKey.new(tmp_path / "key.pem")

    def check(rows, after=None, **noise):
        privacy = settings.Privacy(noise_multiplier=5.0, epsilon=100.0, delta=1e-6, users=1000, **noise)
        facts = {name: getattr(privacy, name) for name in settings.Noise.__struct_fields__}
        ledger = tuple(settings.LedgerEntry(**facts, round=number, clip=clip, devices=10) for number, clip in rows)
        certificate = settings.PrivacyCertificate(
            task="t", round=after or rows[-1][0], model=hashlib.sha256(MODEL).hexdigest(), privacy=privacy,
            rounds=len(ledger), epsilon=accounting.spent(ledger, privacy.delta), ledger=settings.ledger_digest(ledger),
        )  # fmt: skip
        signed = key.sign_statement(certificate)
        return [one.partition(":")[0] for one in verify(MODEL, settings.CertifiedLedger(signed, ledger)).wrong]

    return check


def test_rounds_left_out_are_refused_where_their_distance_counts(wrong):
    assert wrong([(number, 1.0) for number in (1, 3, 5)], min_separation_rounds=2) == ["rounds"]


def test_rounds_without_devices_are_allowed_where_no_distance_counts(wrong):
    assert wrong([(number, 1.0) for number in (1, 3, 5)]) == []


@pytest.mark.parametrize("noise", [{"mechanism": "tree"}, {"mechanism": "banded", "bands": 2}])
def test_bounds_that_differ_are_refused_where_noise_is_taken_back(wrong, noise):
    separation = {"min_separation_rounds": noise.get("bands", 1)}
    assert wrong([(1, 1.0), (2, 2.0)], **noise, **separation) == ["clip"]
    assert wrong([(1, 2.0), (2, 2.0)], **noise, **separation) == []


def test_bounds_may_differ_where_each_round_has_noise_of_its_own(wrong):
    assert wrong([(1, 1.0), (2, 2.0)]) == []


def test_a_trained_model_without_noisy_sums_is_refused(wrong):
    assert wrong([], after=7) == ["rounds"]


def test_devices_drawn_by_chance_alone_are_not_believed(wrong):
    assert wrong([(1, 1.0)], sampling_probability=0.1) == ["sampling_probability"]


ROUNDS = 21


def tree():
    matrix_TT = np.zeros((ROUNDS, ROUNDS))
    for end in range(1, ROUNDS + 1):
        matrix_TT[end - 1, end - accounting.block(end) : end] = 1
    return matrix_TT


def banded(bands):
    shifted = [c * np.eye(ROUNDS, k=-k) for k, c in enumerate(accounting.coefficients(bands))]
    return np.sum(shifted, axis=0)


@pytest.mark.parametrize(
    ("mechanism", "bands", "matrix_TT"),
    [("gaussian", 1, np.eye(ROUNDS)), ("tree", 1, tree()), ("banded", 2, banded(2)), ("banded", 7, banded(7))],
)
def test_row_of_the_inverse_is_that_of_linear_algebra(mechanism, bands, matrix_TT):
    inverse_TT = np.linalg.inv(matrix_TT)
    for step in range(1, ROUNDS + 1):
        row_T = np.zeros(ROUNDS)
        for before, weight in accounting.inverse_row(mechanism, bands, step).items():
            row_T[before - 1] = weight
        np.testing.assert_allclose(row_T, inverse_TT[step - 1], atol=1e-12)


def skellam_rows(count, **facts):
    given = {"noise_multiplier": 1.5, "mechanism": "distributed", "clip": 1.0, "devices": 40, "honest": 30}
    return [settings.LedgerEntry(**given | {"square": 10_000} | facts, round=number) for number in range(1, count + 1)]


def exact(variance, moved, order):
    """The Rényi divergence of Skellam noise from itself, moved by a whole number, summed up over all numbers."""
    reach = math.ceil(25 * math.sqrt(variance))
    k = np.arange(-reach, reach + 1)
    here, there = np.log(ive(np.abs(k), variance)), np.log(ive(np.abs(k - moved), variance))
    return np.logaddexp.reduce(order * there - (order - 1) * here) / (order - 1)


@pytest.mark.parametrize("moved", [1, 3, 20])
@pytest.mark.parametrize("order", [2, 5])
def test_divergence_is_no_less_than_that_of_the_distribution(moved, order):
    for multiplier in (0.7, 2.0):
        (row,) = skellam_rows(1, noise_multiplier=multiplier, square=moved**2)
        truth = exact(multiplier**2 * moved**2, moved, order)
        claimed = accounting.divergence([row], order)
        assert truth <= claimed * (1 + 1e-9)
        if moved == 20 and multiplier == 2:
            assert claimed <= 1.05 * truth


def test_fine_steps_spend_hardly_more_than_gaussian_noise():
    gaussian = accounting.spent([settings.Noise(noise_multiplier=1.5)] * 9, 1e-3)
    fine, coarse = accounting.spent(skellam_rows(9), 1e-3), accounting.spent(skellam_rows(9, square=4), 1e-3)
    assert gaussian < fine < 1.15 * gaussian
    assert coarse > 1.05 * fine


def test_separation_of_rounds_lets_a_device_be_in_fewer():
    apart = {"min_separation_rounds": 3}
    assert accounting.spent(skellam_rows(9, **apart), 1e-5) == accounting.spent(skellam_rows(3), 1e-5)


def test_row_of_devices_needs_the_facts_of_their_noise():
    with pytest.raises(PrivacyError, match="square must be above 0 if distributed"):
        skellam_rows(1, square=0)
    with pytest.raises(PrivacyError, match="honest must be at most the devices"):
        skellam_rows(1, honest=41)
