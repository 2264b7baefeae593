"""Silence of a device: after how many seconds it is lost."""

from __future__ import annotations

_BROKEN_S, _BROKEN_SHARE = 2.0, 0.25
_LEAST_SILENCE_S, _CONTACTS_PER_S = 5.0, 100.0


def lost_after_s(devices: int) -> float:
    """The seconds of silence after which a device is lost, in a round of `devices`.

    It grows with the round, so that all of its devices together make no more requests than one process answers.
    """
    return _LEAST_SILENCE_S + devices / _CONTACTS_PER_S


def broken_after_s(lost_after_s: float) -> float:
    """The seconds without a request after which a device is lost whose connection broke, where silence takes so long.

    A process that is killed closes its connections, and so does a proxy that restarts; behind it the device asks again.
    """
    return min(max(_BROKEN_S, _BROKEN_SHARE * lost_after_s), lost_after_s)
