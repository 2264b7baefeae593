"""The state of random numbers: torch's, on CPU and GPUs, to restore; Python's and NumPy's, to compare."""

from __future__ import annotations

import torch

from export.python_state import drawn


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
