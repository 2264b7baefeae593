"""The threads that torch computes with in this process.

Torch's rounding of a sum depends on their number, so a simulation computes with one thread on the CPU in every process.
This does not slow down small batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread on the CPU in a block or a decorated function, and restore the number after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
