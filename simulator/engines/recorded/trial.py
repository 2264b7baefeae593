"""The trial of a program: its first run, compared with the function, from the same random state.

A fault in a recording makes a program read unwritten or wrong memory. The first shows as NaN, because the workspace is
filled with it before; the second differs by about the size of the values. Rounding is a thousand times below the
tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from export.purity import drawn


class RandomState:
    """The state at the creation of this object."""

    def __init__(self) -> None:
        self._cpu, self._drawn = torch.get_rng_state(), drawn()
        initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpus = torch.cuda.get_rng_state_all() if initialised else []

    def put_back(self) -> None:
        """Let torch repeat the numbers that it has drawn since."""
        torch.set_rng_state(self._cpu)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)

    @property
    def drawn_elsewhere(self) -> bool:
        """Whether Python or NumPy has drawn numbers since."""
        return drawn() != self._drawn


# The allowed distance between a program's and its function's values, relative to the largest value, and absolute.
CLOSE, TINY = 1e-4, 1e-6


class Before:
    """The memory and torch's random state before a trial."""

    def __init__(self, memory: Iterable[torch.UntypedStorage]) -> None:
        distinct = {storage._cdata: storage for storage in memory}
        self._memory = [
            (storage, storage.clone())  # type: ignore[no-untyped-call]
            for storage in distinct.values()
        ]
        self._random = RandomState()

    def put_back(self) -> None:
        """Restore everything."""
        for storage, before in self._memory:
            storage.copy_(before)
        self._random.put_back()

    def same_around(self, targets: Iterable[Tensor]) -> bool:
        """Whether a program that wrote to targets left the rest of their memory unchanged."""
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
    """Whether outputs equal those of the recording, up to rounding."""
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
