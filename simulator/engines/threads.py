"""The threads that torch computes with in this process.

How torch rounds a sum depends on their number, so everything that a simulation computes on the CPU has one, in this
process as in others. Small batches are not slower for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """A block, or a decorated function, in which torch computes with one thread on the CPU, and as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
