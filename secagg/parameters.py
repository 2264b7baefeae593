"""Parameters: the number of neighbours and shares that a cohort needs. Spec: docs/spec/secagg.md §2.

The conditions are those of Bell et al. (CCS 2020, §3 and §4) for a server that is semi-malicious: it forms the roster
honestly and may lie afterwards. All arithmetic is exact, so that every implementation computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import comb

from secagg.errors import PolicyViolation

LEAST_COHORT = 8
"""A sum over fewer devices reveals too much about each."""
COMPLETE_UP_TO = 64
SECURITY_BITS, CORRECTNESS_BITS = 40, 20
LARGEST_COHORT = 1 << 20
MOST_NEIGHBOURS = 1000  # on a ring; beyond, the exact bound takes long to compute and is never needed


@dataclass(frozen=True, slots=True)
class GraphParameters:
    """A roster of n devices with k neighbours each, of which t reveal a secret."""

    n: int
    k: int
    t: int

    @property
    def complete(self) -> bool:
        """Whether all devices are neighbours of each other."""
        return self.k == self.n - 1


def find(n: int) -> GraphParameters:
    """The fewest neighbours, then the fewest shares, that keep a cohort of n secure and let it lose a tenth.

    Raises PolicyViolation when n is below 8, the least cohort, or absurd.
    """
    _check_size(n)
    if n <= COMPLETE_UP_TO:
        return GraphParameters(n, n - 1, (n - 1 + _corrupt_neighbours(n)) // 2 + 1)
    candidates = (GraphParameters(n, k, _least_shares(n, k)) for k in range(2, n - 1, 2))
    # The sum is lost if more than k − t of a device's k neighbours drop out.
    return next(p for p in candidates if p.t <= p.k and _is_rare(n, p.k, p.k - p.t + 1, CORRECTNESS_BITS))


def check(parameters: GraphParameters) -> None:
    """Raise PolicyViolation if a server can collect both secrets of a device with probability above 2^-40."""
    n, k, t = parameters.n, parameters.k, parameters.t
    _check_size(n)
    well_formed = t <= k and (
        parameters.complete or (n > COMPLETE_UP_TO and k < n - 1 and k <= MOST_NEIGHBOURS and k % 2 == 0)
    )
    if not (well_formed and _is_secure(n, k, t)):
        raise PolicyViolation(
            f"{t} shares among {k} neighbours are too weak for {n} devices: the coordinator must ask for at least "
            f"{find(n).t} of {find(n).k}"
        )


def _check_size(n: int) -> None:
    if not LEAST_COHORT <= n <= LARGEST_COHORT:
        raise PolicyViolation(
            f"a cohort of {n} devices is refused: a sum over fewer than {LEAST_COHORT} says too much about each, and "
            f"more than {LARGEST_COHORT} go into groups"
        )


def least_honest(min_sum: int, n_max: int) -> int:
    """The fewest honest devices in a sum of min_sum or more, when a roster has up to n_max devices.

    It assumes that as many devices are corrupt, and survive, as a graph of any size in this range must tolerate. 0 if
    all may be corrupt.
    """
    corrupt = max(_corrupt_neighbours(n_max), _corrupt_neighbours(min(n_max, COMPLETE_UP_TO)))
    return max(0, min_sum - corrupt)


def _corrupt_neighbours(n: int) -> int:
    """The number of corrupt devices that a complete graph must tolerate."""
    return max(2, -(-n // 5)) if n <= COMPLETE_UP_TO else n // 10


def _is_secure(n: int, k: int, t: int) -> bool:
    # Honest neighbours give one share of either secret, corrupt ones both: 2t shares need 2t − k corrupt ones.
    if 2 * t <= k:
        return False
    if k == n - 1:
        return 2 * t - k > _corrupt_neighbours(n)
    return _is_rare(n, k, 2 * t - k, SECURITY_BITS)


def _least_shares(n: int, k: int) -> int:
    """The least t that is secure with k neighbours; k + 1 if none is."""
    low, high = k // 2 + 1, k + 1
    while low < high:
        t = (low + high) // 2
        low, high = (low, t) if _is_secure(n, k, t) else (t + 1, high)
    return low


def _is_rare(n: int, k: int, bad: int, bits: int) -> bool:
    """Whether the expected number of devices with at least `bad` bad neighbours is below 2^-bits.

    A tenth of the n devices is bad, the k neighbours are drawn from the n − 1 others: a hypergeometric tail.
    """
    c = n // 10
    ways = sum(comb(c, x) * comb(n - 1 - c, k - x) for x in range(bad, min(c, k) + 1))
    return n * ways << bits < comb(n - 1, k)


def leave_out(complaints: Mapping[int, Iterable[int]], chosen: GraphParameters) -> frozenset[int]:
    """The devices to leave out, so that no two remaining devices have a complaint; `complaints` are by accuser.

    Boxes between honest devices open, so a corrupt device is a party to every complaint. A device lies if it is a party
    to as many complaints as an honest device can have corrupt neighbours, or more; then only that device leaves. For
    every other complaint both parties leave, since it does not show which of them lies. So at most as many honest
    devices leave as corrupt ones.
    """
    parties: dict[int, set[int]] = {}
    for accuser, accused in complaints.items():
        for position in accused:
            parties.setdefault(accuser, set()).add(position)
            parties.setdefault(position, set()).add(accuser)
    left_out = {position for position, others in parties.items() if len(others) >= 2 * chosen.t - chosen.k}
    for position in sorted(parties):
        open_ = sorted(parties[position] - left_out)
        if position not in left_out and open_:
            left_out |= {position, open_[0]}
    return frozenset(left_out)
