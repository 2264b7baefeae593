"""The trial of a program: its first run, held against what its function gave when it was recorded.

A fault in a recording makes a program read memory that nobody wrote, or something else altogether. The first shows as
NaN, as the workspace is spoiled before; the second differs by about as much as the values themselves. Round-off is a
thousand times below what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from simulator.engines.recorded.random_state import RandomState

# Of the largest value of an output, and of 1: so far may a value of a program be from what its function gives.
CLOSE, TINY = 1e-4, 1e-6


class Before:
    """What memory and torch's random numbers were before a trial."""

    def __init__(self, memory: Iterable[torch.UntypedStorage]) -> None:
        distinct = {storage._cdata: storage for storage in memory}
        self._memory = [
            (storage, storage.clone())  # type: ignore[no-untyped-call]
            for storage in distinct.values()
        ]
        self._random = RandomState()

    def put_back(self) -> None:
        """Let all be as it was."""
        for storage, before in self._memory:
            storage.copy_(before)
        self._random.put_back()

    def same_around(self, targets: Iterable[Tensor]) -> bool:
        """Whether a program that wrote to targets left the rest of their memory alone."""
        before = {storage._cdata: copy.clone() for storage, copy in self._memory}
        targets = list(targets)
        for target in targets:
            storage = target.untyped_storage()
            there = target.new_empty(0).set_(
                before[storage._cdata], int(target.storage_offset()), target.shape, target.stride()
            )
            there.copy_(target)
        memory = (target.untyped_storage() for target in targets)
        return all(torch.equal(_bytes(storage), _bytes(before[storage._cdata])) for storage in memory)


def agree(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether outputs are what they were when they were recorded, up to round-off."""
    return actual.keys() == wanted.keys() and all(_close(actual[name], tensor) for name, tensor in wanted.items())


def _close(actual: Tensor, wanted: Tensor) -> bool:
    if (actual.shape, actual.dtype) != (wanted.shape, wanted.dtype):
        return False
    if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
        return torch.equal(actual, wanted)
    finite = wanted.isfinite()
    actual, wanted = actual[finite], wanted[finite]
    # NaN is not below anything.
    return not len(wanted) or bool(((actual - wanted).abs() <= CLOSE * wanted.abs().max() + TINY).all())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
