"""Attempts at a call: which failures pass, how long to pause, how often a session tries. Spec: docs/spec/wire.md §1."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import TypeVar

from device_runtime.errors import Refused, Unreachable

T = TypeVar("T")
RETRIES = 3
RETRIED_STATUSES = frozenset({429, 503})
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
LONGEST_NAP_S = 0.25


class Attempts:
    """Makes calls again: RETRIES times until `renew`, and as often after it. Never once the device is told to stop.

    mend: does what makes the same call worth another attempt at once; it says whether there was such a thing. Each kind
    of refusal is mended once per call.
    """

    def __init__(
        self,
        mend: Callable[[Refused], bool],
        stopping: Callable[[], bool],
        sleep: Callable[[float], None],
        rng: random.Random,
    ) -> None:
        self._mend = mend
        self._stopping = stopping
        self._sleep = sleep
        self._rng = rng
        self._left = RETRIES

    def renew(self) -> None:
        """Begin to count anew."""
        self._left = RETRIES

    def make(self, attempt_once: Callable[[], T]) -> T:
        """The result of an attempt, after as many attempts as the rules allow. Raises what the last one raised."""
        mended: set[str] = set()
        for attempt in itertools.count():
            try:
                return attempt_once()
            except (Unreachable, Refused) as error:
                if isinstance(error, Refused) and error.slug not in mended and self._mend(error):
                    mended.add(error.slug)
                    continue
                asked_s = error.after_s if isinstance(error, Refused) else 0.0
                if not _passes(error) or self._left == 0 or asked_s > LONGEST_DELAY_S:
                    raise
                self._left -= 1
                if not self._pause(max(asked_s, FIRST_DELAY_S * 2**attempt * self._rng.uniform(0.5, 1.0))):
                    raise
        raise AssertionError("unreachable")

    def _pause(self, seconds: float) -> bool:
        """Sleep; False as soon as the device is told to stop."""
        while seconds > 0 and not self._stopping():
            self._sleep(min(seconds, LONGEST_NAP_S))
            seconds -= LONGEST_NAP_S
        return not self._stopping()


def _passes(error: Unreachable | Refused) -> bool:
    """Whether the same call may be answered later in this session."""
    # What carries requests may send one twice when a connection breaks. The answer to the first is lost, and only the
    # nonce of the second is at fault.
    if isinstance(error, Unreachable) or error.status in RETRIED_STATUSES or error.slug == "replayed-signature":
        return True
    # The coordinator has just begun. The device's clock is not at fault, and better than Date, which is up to 2 s late.
    return error.slug == "stale-signature" and error.after_s > 0
