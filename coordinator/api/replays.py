"""Replay protection: fresh signatures, each accepted once. Pure: time is an argument. Spec: docs/spec/wire.md §10.

No replay of a request that this process took is ever accepted. A signature that was made before this process began to
answer is refused too, unless no earlier process can have accepted it. When that was is told by the clock as it is now,
less the time that has passed on a steady clock, so that a clock which is set right later refuses nobody; and in the
first ten minutes also by the clock of then. A clock that is set back by more than `WINDOW_S` repeats time: then replays
of what an earlier process took can be accepted, once.
"""

from __future__ import annotations

import hashlib
import math

from coordinator.errors import ReplayedSignature, Unavailable
from fedcore.errors import StaleSignature
from fedcore.wire.signatures import AHEAD_S, WINDOW_S, Signature

_KEY_BYTES = 16
_DAY_S = 86_400
_SWEEP_S = 1.0


class Replays:
    """The signatures accepted within the window, at most `limit`.

    Times are in seconds since 1970; `steady` ones are of a clock that nobody sets. Memory: about 100 bytes a signature,
    for five minutes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._began = self._began_steady = -math.inf
        self._count = 0
        self._seen: dict[int, set[bytes]] = {}
        self._forgotten: dict[int, int] = {}
        """Of every five minutes of the last day, the latest time of which a signature was forgotten."""
        self._swept = -math.inf

    def begin(self, now: float, steady: float) -> None:
        """Begin to answer."""
        self._began, self._began_steady = now, steady

    def demand_new(self, signature: Signature, known_since: float, now: float, steady: float) -> None:
        """Raise ReplayedSignature, StaleSignature when an earlier process may have accepted it, or as `check_time`.

        `known_since` is when its key was enrolled. The signature is not remembered yet.
        """
        signature.check_time(now)  # again: time may have passed since, and then it may be forgotten now
        self._sweep(now)
        first = max(self._first(signature, known_since, now, steady), self._forgotten.get(_span(signature), -1) + 1)
        if signature.created < first:
            wait_s = max(0.0, math.ceil(first) - now)
            raise StaleSignature("the coordinator has restarted since this was signed; sign it again", wait_s)
        if _key(signature) in self._seen.get(signature.created, ()):
            raise ReplayedSignature("a request with this nonce came before; sign every request anew")

    def remember(self, signature: Signature) -> None:
        """Accept a new signature, once. Raises Unavailable when no more can be remembered."""
        if self._count >= self._limit:
            raise Unavailable("too many requests came within five minutes; come back later")
        self._seen.setdefault(signature.created, set()).add(_key(signature))
        self._count += 1

    def _first(self, signature: Signature, known_since: float, now: float, steady: float) -> float:
        """The earliest time at which a signature of a device, enrolled at `known_since`, was not made for another."""
        age_s = steady - self._began_steady
        began = now - age_s
        if known_since >= max(began, self._began):
            return -math.inf
        fresh_then = self._began - WINDOW_S <= signature.created < self._began + AHEAD_S
        return (self._began if fresh_then and age_s < 2 * WINDOW_S else began) + AHEAD_S

    def _sweep(self, now: float) -> None:
        """Forget signatures that are too old to be accepted; once a second is often enough."""
        if 0 <= now - self._swept < _SWEEP_S:
            return
        for created in [created for created in self._seen if created < now - WINDOW_S]:
            self._count -= len(self._seen.pop(created))
            span = created // WINDOW_S
            self._forgotten[span] = max(self._forgotten.get(span, created), created)
        for span in [span for span in self._forgotten if span < (now - _DAY_S) // WINDOW_S]:
            del self._forgotten[span]
        self._swept = now


def _span(signature: Signature) -> int:
    return signature.created // WINDOW_S


def _key(signature: Signature) -> bytes:
    """The part of a signature that is remembered."""
    return hashlib.sha256(f"{signature.keyid} {signature.nonce}".encode()).digest()[:_KEY_BYTES]
