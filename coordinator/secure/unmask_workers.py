"""Unmasker: processes that take the masks off sums, so that no device and no other round waits for it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor

from secagg.session import UnmaskedSum, Unmasking

MOST_PROCESSES = 8
_LOG = logging.getLogger(__name__)


class Unmasker:
    """One sum after the other, each in slices on all processes. They start with the first sum, and stay."""

    def __init__(self) -> None:
        self._parts = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
        self._queue = ThreadPoolExecutor(1, "unmasker")
        self._workers: ProcessPoolExecutor | None = None

    def __call__(self, work: Unmasking) -> Future[UnmaskedSum]:
        """The sum, once it is there, or any SecaggError. After `close` there is none."""
        return self._queue.submit(self._run, work)

    def close(self) -> None:
        """End the processes. Work that they have not begun is cancelled, which is an exception in its future."""
        self._queue.shutdown(wait=False, cancel_futures=True)
        self._end_workers()
        self._queue.shutdown()
        self._end_workers()  # those that the last sum began with meanwhile

    def _end_workers(self) -> None:
        workers = self._workers
        if workers is not None:
            workers.shutdown(cancel_futures=True)

    def _run(self, work: Unmasking) -> UnmaskedSum:
        if self._workers is None:
            # Spawned, since a process with threads must not be forked.
            spawn = multiprocessing.get_context("spawn")
            self._workers = ProcessPoolExecutor(self._parts, spawn, initializer=_be_worker)
        try:
            return work.run(self._workers, self._parts)
        except BrokenExecutor:
            _LOG.exception("a process that takes masks off died; the sum is made without, and others start anew")
            self._end_workers()  # waits for those that the death of one ends too
            self._workers = None
            return work.run()


def _be_worker() -> None:
    """Ctrl-C is for the coordinator, which ends its workers; but when it is killed, they end by themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
