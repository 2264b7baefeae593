"""Complaints: which devices a session goes on without, because a box between two of them did not open.

Spec: docs/spec/secagg.md §7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from secagg.parameters import GraphParameters


def leave_out(complaints: Mapping[int, Iterable[int]], chosen: GraphParameters) -> frozenset[int]:
    """The devices to leave out, so that no complaint is left between two that stay; `complaints` are by accuser.

    Boxes open between honest devices, so a corrupt device is a party to every complaint. One that is a party to as many
    as an honest device has corrupt neighbours, or more, lies, and leaves alone. Of every other complaint both parties
    leave, since nobody can tell which of them lies. So no more honest devices leave than corrupt ones.
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
