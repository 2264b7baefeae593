"""The sensitivity of a question: the L2 norm that one device's blocks have at most.

A device has n rows at most (MAX n ROWS PER DEVICE), each in one of G groups.

* Sums. A row adds at most r to one number of a block, r = max |x|, so the absolute numbers of a block add up to n · r
  at most. Their L2 norm is never above that, and one group with all rows reaches it.
* With CLIP_PER_DEVICE each number is B at most. So no more than k = min(G, n) numbers differ from 0, the squares are
  k · B² at most, and with Σ S² ≤ max S · Σ S also B · n · r. The norm is the least of n · r, √k · B and √(B · n · r).
* Ones: a block of kind "any" has a 1 for every number that a row of the device counts in, and 0 elsewhere: √min(C, n)
  for C numbers.
"""

from __future__ import annotations

import math


def norm_of_sums(groups: int, most_rows: int | None, largest: float, held: float = math.inf) -> float:
    """The most that one device's sums, one for each of G groups, may have as their L2 norm; infinite without bounds.

    largest: the most that a row adds, r. held: what each sum is held to, B.
    """
    rows = math.inf if most_rows is None else most_rows
    together = 0.0 if largest == 0 else rows * largest
    each = min(held, together)
    bounds = [together]
    if math.isfinite(each):
        bounds += [math.sqrt(min(groups, rows)) * each, math.sqrt(each * together)]
    return min(bounds)


def norm_of_ones(cells: int, most_rows: int | None) -> float:
    """The most that one device's ones among so many cells may have as their L2 norm."""
    return math.sqrt(cells if most_rows is None else min(cells, most_rows))
