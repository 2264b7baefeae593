"""Shamir's secret sharing over the prime 2^256 − 189 (CACM 1979), and recovery from false shares.

A polynomial is the list of its coefficients, the constant one first and no zero last.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

from secagg.errors import BadShare, BelowThreshold

PRIME = 2**256 - 189

Polynomial = list[int]


def split(secret: int, k: int, t: int) -> list[int]:
    """Shares of a secret below PRIME for ranks 1 … k. Any t of them recover it; fewer reveal nothing."""
    polynomial = [secret, *(secrets.randbelow(PRIME) for _ in range(t - 1))]
    return [evaluate(polynomial, rank) for rank in range(1, k + 1)]


def evaluate(polynomial: Polynomial, x: int) -> int:
    """The value at x."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


class Lagrange:
    """Secrets from shares among ranks 1 … k. Secrets with the same responders share their coefficients."""

    def __init__(self, k: int) -> None:
        ranks = range(1, k + 1)
        below = [rank * prod(other - rank for other in ranks if other != rank) for rank in ranks]
        self._inverse = dict(zip(ranks, _inverses(below), strict=True))
        self._known: dict[tuple[int, ...], list[int]] = {}

    def combine(self, points: Mapping[int, int]) -> int:
        """The polynomial's value at 0, from shares by rank. Reduced once, at the end."""
        ranks = tuple(points)
        if ranks not in self._known:
            self._known[ranks] = self._coefficients(ranks)
        return sum(c * share for c, share in zip(self._known[ranks], points.values(), strict=True)) % PRIME

    def _coefficients(self, ranks: Sequence[int]) -> list[int]:
        """Π xₘ / (xₘ − x) over the other ranks m, for each rank x.

        The product over all k ranks is inverted once per rank; the factors of absent ranks are multiplied back.
        """
        whole = prod(ranks)
        absent = self._inverse.keys() - set(ranks)
        return [whole * prod([other - rank for other in absent]) * self._inverse[rank] % PRIME for rank in ranks]


def decode(points: Mapping[int, int], t: int) -> Polynomial:
    """The polynomial of degree below t that misses at most ⌊(m − t) / 2⌋ of m points; empty if there is none.

    Gao's decoder of Reed-Solomon codes (A new algorithm for decoding Reed-Solomon codes, 2003): the extended Euclidean
    algorithm on Π (x − xᵢ) and the interpolant stops at error locator × message.
    """
    before, value = _vanish_and_interpolate(points)
    factor_before, factor = [], [1]
    while 2 * (len(value) - 1) >= len(points) + t:
        quotient, rest = _divide(before, value)
        before, value = value, rest
        factor_before, factor = factor, _subtract(factor_before, _multiply(quotient, factor))
    quotient, rest = _divide(value, factor)
    return [] if rest or len(quotient) > t else quotient


def _vanish_and_interpolate(points: Mapping[int, int]) -> tuple[Polynomial, Polynomial]:
    """Π (x − xᵢ), and the polynomial through all points."""
    vanishing = [1]
    for x in points:
        vanishing = _multiply(vanishing, [-x % PRIME, 1])
    through = [0] * len(points)
    weights = _inverses([prod(x - other for other in points if other != x) for x in points])
    for (x, y), weight in zip(points.items(), weights, strict=True):
        basis, _ = _divide(vanishing, [-x % PRIME, 1])
        scale = y * weight % PRIME
        through = [(a + scale * b) % PRIME for a, b in zip(through, basis, strict=True)]
    return vanishing, _trim(through)


def _trim(polynomial: Polynomial) -> Polynomial:
    while polynomial and not polynomial[-1]:
        polynomial.pop()
    return polynomial


def _multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    product = [0] * max(len(a) + len(b) - 1, 0)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    return _trim([value % PRIME for value in product])


def _subtract(a: Polynomial, b: Polynomial) -> Polynomial:
    size = max(len(a), len(b))
    padded = zip(a + [0] * (size - len(a)), b + [0] * (size - len(b)), strict=True)
    return _trim([(x - y) % PRIME for x, y in padded])


def _divide(a: Polynomial, b: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Quotient and remainder."""
    rest, inverse = list(a), pow(b[-1], -1, PRIME)
    quotient = [0] * max(len(a) - len(b) + 1, 0)
    for i in reversed(range(len(quotient))):
        quotient[i] = rest[i + len(b) - 1] * inverse % PRIME
        for j, x in enumerate(b):
            rest[i + j] = (rest[i + j] - quotient[i] * x) % PRIME
    return _trim(quotient), _trim(rest)


def _inverses(values: Sequence[int]) -> list[int]:
    """Inverses of all values at the cost of one inversion (Montgomery 1987, §10.3.1)."""
    before = [1]
    for value in values:
        before.append(before[-1] * value % PRIME)
    inverse = pow(before[-1], -1, PRIME)
    inverses = []
    for value, product in zip(reversed(values), reversed(before[:-1]), strict=True):
        inverses.append(inverse * product % PRIME)
        inverse = inverse * value % PRIME
    return inverses[::-1]


class Recovery:
    """Secrets from t of k shares each, of which some may be false."""

    def __init__(self, k: int, t: int) -> None:
        self._t = t
        self._lagrange = Lagrange(k)

    def recover(
        self, points: Mapping[int, int], fits: Callable[[int], bool], suspects: Collection[int] = ()
    ) -> tuple[int, list[int]]:
        """The secret that `fits`, from shares by rank, and the ranks of the false shares that it came across.

        suspects: ranks whose devices sent other false shares. Their shares are used only if there is no secret without
        them, so a device that lies about many secrets costs one decoding.

        Raises BelowThreshold for fewer than t shares. Raises BadShare when too many of them are false. Of m shares up
        to ⌊(m − t) / 2⌋ may be false, and one always if m > t.
        """
        ranks = tuple(sorted(points))
        if len(ranks) < self._t:
            raise BelowThreshold(f"{len(ranks)} shares of a secret came, and {self._t} are needed")
        trusted = tuple(rank for rank in ranks if rank not in suspects)
        for some in dict.fromkeys((trusted, ranks)):
            if len(some) < self._t:
                continue
            secret = self._lagrange.combine({rank: points[rank] for rank in some[: self._t]})
            if fits(secret):
                return secret, []
            polynomial = self._decode({rank: points[rank] for rank in some}, fits)
            if polynomial:
                return polynomial[0], [rank for rank in ranks if evaluate(polynomial, rank) != points[rank]]
        raise BadShare(f"no {self._t} of {len(ranks)} shares give the secret: its dealer lied, or too many others did")

    def _decode(self, points: Mapping[int, int], fits: Callable[[int], bool]) -> list[int]:
        """The polynomial whose secret fits; empty if there is none.

        A secret that fits is certainly right. So if m − t is odd and one more share is false than decoding corrects,
        leaving out one share at a time still finds the secret.
        """
        odd = (len(points) - self._t) % 2
        for left_out in (0, *points) if odd else (0,):
            polynomial = decode({rank: share for rank, share in points.items() if rank != left_out}, self._t)
            if polynomial and fits(polynomial[0]):
                return polynomial
        return []
