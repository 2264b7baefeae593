from fractions import Fraction
from math import comb

import pytest

from secagg import parameters
from secagg.errors import PolicyViolation
from secagg.parameters import GraphParameters

TABLE = {100: (32, 22), 200: (56, 39), 500: (82, 57), 1000: (96, 67), 2000: (106, 74), 10000: (122, 85)}


def expected_bad(n, k, least):
    """n · P[X ≥ least] for k neighbours of n − 1 others, a tenth of n bad."""
    c = n // 10
    ways = (comb(c, x) * comb(n - 1 - c, k - x) for x in range(least, k + 1) if k - x <= n - 1 - c)
    return Fraction(n * sum(ways), comb(n - 1, k))


@pytest.mark.parametrize(("n", "expected"), TABLE.items())
def test_the_finder_gives_the_table(n, expected):
    found = parameters.find(n)
    assert (found.k, found.t) == expected
    parameters.check(found)


@pytest.mark.security("be at most a tenth of a roster (a fifth up to 64 devices)")
@pytest.mark.parametrize("n", [65, 100, 333, 1000])
def test_what_is_found_holds_both_bounds_and_nothing_smaller_does(n):
    found = parameters.find(n)

    def good(k, t):
        secure = expected_bad(n, k, 2 * t - k) < Fraction(1, 2**40)
        return secure and expected_bad(n, k, k - t + 1) < Fraction(1, 2**20)

    assert good(found.k, found.t)
    assert not good(found.k, found.t - 1)
    assert not any(good(found.k - 2, t) for t in range(found.k // 2, found.k - 1))


def test_every_size_of_cohort_has_parameters_that_a_device_accepts():
    for n in (*range(65, 300), 777, 3000, 2**17):
        parameters.check(parameters.find(n))


@pytest.mark.security("be at most a tenth of a roster (a fifth up to 64 devices)")
@pytest.mark.security("passes a device's check with chance (1 − f)^k")
def test_up_to_64_everyone_is_a_neighbour_and_a_fifth_may_be_corrupt():
    for n in range(8, 65):
        found = parameters.find(n)
        assert found.k == n - 1
        assert 2 * found.t - found.k > max(2, -(-n // 5)) >= 2 * (found.t - 1) - found.k
        parameters.check(found)


@pytest.mark.parametrize("n", [-1, 0, 7, 2**20 + 1])
def test_cohorts_that_are_too_small_or_absurd_are_refused(n):
    for call in (parameters.find, lambda n: parameters.check(GraphParameters(n, n - 1, n - 1))):
        with pytest.raises(PolicyViolation, match="cohort"):
            call(n)


@pytest.mark.security("both of its secrets come out only if at least 2t − k of its neighbours are corrupt")
@pytest.mark.parametrize(
    "weak", [(100, 32, 21), (100, 30, 20), (100, 33, 26), (100, 32, 33), (1000, 96, 66), (20, 19, 11), (20, 19, 20),
             (20, 20, 15), (100, 99, 54), (100, 0, 0), (100, 2, 1), (9, 6, 6), (64, 20, 20)],
)  # fmt: skip
def test_parameters_that_are_too_weak_or_make_no_graph_are_refused(weak):
    with pytest.raises(PolicyViolation, match=str(weak[2])):
        parameters.check(GraphParameters(*weak))


def test_more_shares_or_neighbours_than_needed_are_accepted():
    for strong in ((100, 32, 30), (100, 99, 60), (100, 60, 40), (20, 19, 15)):
        parameters.check(GraphParameters(*strong))


@pytest.mark.security("min_sum less those that may be corrupt")
def test_the_fewest_honest_devices_of_a_sum_are_those_left_by_any_roster():
    """A fifth of up to 64 devices may be corrupt, and a tenth of more, where that is not fewer than of 64."""
    for n_max in range(8, 300):
        corrupt = max(max(2, -(-n // 5)) if n <= 64 else n // 10 for n in range(8, n_max + 1))
        for min_sum in (8, 50, n_max):
            assert parameters.least_honest(min_sum, n_max) == max(0, min_sum - corrupt)
