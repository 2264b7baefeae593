"""The state of torch's random numbers, on the CPU and on GPUs, to be put back."""

from __future__ import annotations

import torch


class RandomState:
    """The state when this was made."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpus = torch.cuda.get_rng_state_all() if initialised else []

    def put_back(self) -> None:
        """Let torch draw the numbers again that it has drawn since."""
        torch.set_rng_state(self._cpu)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)
