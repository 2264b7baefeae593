import pytest
from hypothesis import given, settings, strategies as st

from secagg import shamir
from secagg.errors import BadShare, BelowThreshold
from secagg.shamir import PRIME, Lagrange, Recovery
from tests.secagg import reference

SECRETS = st.integers(0, PRIME - 1)


def is_prime(n):
    """Miller-Rabin for the first twelve primes."""
    d, s = n - 1, 0
    while d % 2 == 0:
        d, s = d // 2, s + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, d, n)
        if x not in {1, n - 1} and all((x := x * x % n) != n - 1 for _ in range(s - 1)):
            return False
    return True


def test_the_modulus_is_the_largest_prime_of_256_bits():
    assert is_prime(PRIME)
    assert not any(is_prime(n) for n in range(PRIME + 2, 2**256, 2))


@pytest.mark.security("Up to t − 1 neighbours together: nothing. Shares are Shamir's")
@given(secret=SECRETS, k=st.integers(1, 12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_t_shares_give_the_secret_as_the_formula_does(secret, k, data):
    t = data.draw(st.integers(1, k))
    shares = dict(enumerate(shamir.split(secret, k, t), 1))
    ranks = data.draw(st.permutations(range(1, k + 1)))[:t]
    points = {rank: shares[rank] for rank in ranks}
    assert Lagrange(k).combine(points) == secret == reference.interpolate(points, PRIME)


@pytest.mark.security("No neighbour's vector; one share of each of their secrets")
@pytest.mark.security("Up to t − 1 neighbours together: nothing. Shares are Shamir's")
def test_one_share_less_fits_every_secret():
    shares = dict(enumerate(shamir.split(5, 4, 3), 1))
    for guess in (0, 6, PRIME - 1):
        through = {0: guess, 1: shares[1], 2: shares[2]}
        assert [reference.interpolate(through, PRIME, x) for x in (0, 1, 2)] == [guess, shares[1], shares[2]]


@pytest.mark.parametrize(("k", "t", "false"), [(4, 3, 1), (9, 3, 3), (31, 22, 4), (31, 22, 5), (31, 28, 2)])
def test_false_shares_are_named_and_the_secret_is_found(k, t, false):
    points = dict(enumerate(shamir.split(77, k, t), 1))
    lying = list(range(1, false + 1))
    for rank in lying:
        points[rank] = (points[rank] + 1) % PRIME
    assert Recovery(k, t).recover(points, lambda found: found == 77) == (77, lying)


@pytest.mark.parametrize(("k", "t", "false"), [(3, 3, 1), (5, 3, 3), (31, 22, 9)])
def test_too_many_false_shares_lose_the_secret(k, t, false):
    points = dict(enumerate(shamir.split(77, k, t), 1))
    for rank in range(1, false + 1):
        points[rank] ^= 1
    with pytest.raises(BadShare):
        Recovery(k, t).recover(points, lambda found: found == 77)


def test_too_few_shares_are_counted():
    with pytest.raises(BelowThreshold, match="2 shares"):
        Recovery(4, 3).recover({1: 5, 2: 6}, lambda _: True)


@pytest.mark.security("False shares are corrected as far as the code allows, and their senders named")
@given(
    coefficients=st.lists(SECRETS, min_size=3, max_size=3),
    errors=st.dictionaries(st.integers(1, 10), SECRETS, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_decoding_corrects_as_many_errors_as_the_code_allows(coefficients, errors):
    clean = {x: shamir.evaluate(coefficients, x) for x in range(1, 11)}
    found = shamir.decode(clean | errors, 3)
    assert [shamir.evaluate(found, x) for x in clean] == list(clean.values())


def test_a_device_that_lies_about_every_secret_costs_one_decoding(monkeypatch):
    """Once, it cost one for every secret, which took seconds."""
    decodings, decode = [], shamir.decode

    def counted(points, t):
        decodings.append(points)
        return decode(points, t)

    monkeypatch.setattr(shamir, "decode", counted)
    n, k, t, liars = 30, 30, 15, {1, 2, 3}
    found, known = Recovery(k, t), set()
    for secret in range(n):
        points = dict(enumerate(shamir.split(secret, k, t), 1))
        points |= {rank: (points[rank] + 1) % PRIME for rank in liars}
        recovered, false = found.recover(points, secret.__eq__, known)
        known.update(false)
        assert recovered == secret
    assert known == liars
    assert len(decodings) == 1


def test_shares_of_suspects_count_where_there_are_too_few_others():
    points = dict(enumerate(shamir.split(77, 9, 6), 1))
    assert Recovery(9, 6).recover(points, (77).__eq__, {1, 2, 3, 4}) == (77, [])
    points[9] = 0
    assert Recovery(9, 6).recover(points, (77).__eq__, {1, 2, 3}) == (77, [])
