"""Secrets from shares, some of which may be false. Spec: docs/spec/secagg.md §7."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from secagg.errors import BadShare, BelowThreshold
from secagg.shamir import Lagrange, decode, evaluate


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
