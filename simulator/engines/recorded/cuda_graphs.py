"""CUDA graphs: runs of programs that a GPU keeps, and replays as one piece of work.

A step of a small model is hundreds of kernels, and starting a kernel takes the CPU longer than running it takes the
GPU. A graph starts all of them at once. It is for one number of clients, so steps use few different numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Run = Callable[[], dict[str, Tensor]]
"""Runs a program on the present values of its arguments, in memory that stays; returns its outputs by name."""
Capture = Callable[[Run], Run]
"""Turns a run, which it may call once without effect, into a faster one with the same effect on the same memory."""


class CudaGraphs:
    """Captures runs on one GPU. The graphs share memory, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """A replay of a run, or the run itself if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                outputs = run()
        except RuntimeError as error:
            log.warning("a step runs without a CUDA graph, and slower: %s", str(error).partition("\n")[0])
            return run

        def replay() -> dict[str, Tensor]:
            graph.replay()
            return dict(outputs)

        return replay


def padded(active: int, clients: int) -> int:
    """The number of clients that a step trains if `active` of `clients` have a batch left: at most a quarter more.

    There are four such numbers between a power of two and the next, so captured graphs are reused.
    """
    unit = 1 << max(0, active.bit_length() - 3)
    return min(-(-active // unit) * unit, clients)
