"""Complaints: the devices that a session leaves out, because a box between two devices did not open.

Spec: docs/spec/secagg.md §7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from secagg.parameters import GraphParameters


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
