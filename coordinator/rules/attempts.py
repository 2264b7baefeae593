"""Failed attempts at a round: the reasons that count as failures, and the pause that follows them."""

from __future__ import annotations

FAILURES = frozenset({"too-few-reports", "no-beacon", "secagg-failed", "sum-out-of-range", "invalid-aggregate"})
"""Reasons to abandon a round for which devices or the plan are to blame: another attempt may well end the same way."""
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 15.0, 900.0


def back_off_s(failures: int) -> float:
    """How long a task pauses after so many failed attempts in a row: not at all after one, then twice as long each."""
    return 0.0 if failures < 2 else min(_FIRST_BACK_OFF_S * 2.0 ** min(failures - 2, 32), _LONGEST_BACK_OFF_S)
