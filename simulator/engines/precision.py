"""Single precision on GPUs, in convolutions and recurrent layers too, as on CPUs and devices.

By default torch lets cuDNN multiply float32 values there with 10 of their 23 bits after the point (TF32).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUDNN: Any = torch.backends.cudnn


@contextmanager
def single_precision() -> Iterator[None]:
    """Let GPUs multiply with all bits in a block or a decorated function, and restore the settings after."""
    before = _CUDNN.conv.fp32_precision, _CUDNN.rnn.fp32_precision
    _set(False, "ieee", "ieee")
    try:
        yield
    finally:
        _set("tf32" in before, *before)


def _set(allow_tf32: bool, convolutions: str, recurrent: str) -> None:
    """Set the older switch and the newer ones: torch refuses to read the first while they contradict it."""
    _CUDNN.allow_tf32 = allow_tf32
    _CUDNN.conv.fp32_precision, _CUDNN.rnn.fp32_precision = convolutions, recurrent
