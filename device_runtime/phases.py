"""Phases of a session, and the seconds of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

Phase: TypeAlias = Literal["start", "wait", "fetch", "train", "mask", "upload"]
"""start: opening state, engine and examples, and anything outside the other phases. wait: for an assignment. fetch: of
plan, graphs and checkpoint. train: loading and running graphs. mask: sharing secrets and masking the report. upload:
from the first byte of a report or of a secure-aggregation message to the answer, including waits for other devices.
"""


class Phases:
    """A stopwatch of phases: an inner phase stops the outer one. `seconds` are wall time, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._phase: Phase = "start"
        self._since = time.monotonic()

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Count the time inside the block to this phase."""
        outer = self._phase
        self._turn(phase)
        try:
            yield
        finally:
            self._turn(outer)

    def stop(self) -> dict[Phase, float]:
        """Stop, and return the seconds of every phase."""
        self._turn(self._phase)
        return dict(self.seconds)

    def _turn(self, phase: Phase) -> None:
        now = time.monotonic()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
