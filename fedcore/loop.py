"""The loop of a pass over the local examples, as data. It needs no NumPy."""

from __future__ import annotations

import msgspec

from fedcore.errors import PlanError


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    """The sweeps of a pass over the local examples.

    `epochs` sweeps in batches of `batch_size`. `steps` limits the steps of all sweeps, if set; with `shuffle` every
    sweep has a new order.
    """

    batch_size: int
    epochs: int = 1
    steps: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least 1, not {value}")

    def step_count(self, examples: int) -> int:
        """Number of batches over `examples` local examples."""
        total = self.epochs * -(-examples // self.batch_size)
        return total if self.steps is None else min(total, self.steps)
