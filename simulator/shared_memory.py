"""Shared memory: tensors that a process shares with those it forks afterwards."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros on the CPU. Memory is only used once written to, and begins at a page, as that of large tensors does."""
    size = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, max(1, size) * dtype.itemsize), dtype=dtype, count=size).reshape(shape)
