"""Attempts at a call: temporary failures, pauses, and the number of attempts. Spec: docs/spec/wire.md §1."""

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
    """Repeats calls: RETRIES times until `renew`, and as often after it. Never after the device is told to stop.

    mend: tries to remove the cause of a refusal, so that the call is worth another attempt at once; returns whether it
    did. It is called once per call for each kind of refusal.
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
        """Start counting retries from zero."""
        self._left = RETRIES

    def make(self, attempt_once: Callable[[], T]) -> T:
        """The result of the first successful attempt. After the last allowed attempt, raises its error."""
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
    """Whether the same call may succeed later in this session."""
    # A proxy may send a request twice when a connection breaks. The first answer is lost, and the second request is
    # refused only for its repeated nonce.
    if isinstance(error, Unreachable) or error.status in RETRIED_STATUSES or error.slug == "replayed-signature":
        return True
    # The coordinator has just started. The device's clock is right, and better than Date, which is up to 2 s late.
    return error.slug == "stale-signature" and error.after_s > 0
