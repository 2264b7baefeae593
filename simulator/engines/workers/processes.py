"""Processes that train the blocks of a cohort, with one thread each: no result depends on how many there are.

They are forked, so that all share the examples. What clients receive, and the sums of blocks, lie in memory that is
shared too, and pipes carry only which block is whose.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from fedcore.plan import in_turn
from fedcore.validation import decoder
from simulator.client_states import shared_zeros
from simulator.engines.memory import keep_freed_memory
from simulator.engines.sums import Client, ClientTrainer, RoundSums, SumsLayout
from simulator.engines.workers.forked import AHEAD, Answer, Failure, Forked, in_order

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
Blocks = Sequence[Sequence[Client]]


class CohortTrainer(Protocol):
    """What trains the blocks of a cohort, and adds up their sums in order."""

    def train(self, number: int, received: Mapping[str, Tensor], blocks: Blocks) -> RoundSums:
        """Run the trip of round `number`. Raises EngineError, ExportError or ProcessDied when it cannot be done."""


class OneProcess:
    """This process alone. device: where the trainer computes. layouts: of every trip."""

    def __init__(self, trainer: ClientTrainer, layouts: Sequence[SumsLayout], device: torch.device) -> None:
        self._trainer, self._layouts, self._device = trainer, layouts, device

    def train(self, number: int, received: Mapping[str, Tensor], blocks: Blocks) -> RoundSums:
        """Train one block after the other: see CohortTrainer."""
        layout = in_turn(self._layouts, number)
        total, part = (torch.empty(layout.size, dtype=torch.float64, device=self._device) for _ in range(2))
        sums = RoundSums(layout, total)
        for block in blocks:
            self._trainer.train(number, received, block, RoundSums(layout, part))
            sums.vector += part
        return sums


class _Order(msgspec.Struct, frozen=True):
    """An order to train the clients of a block in a round, and to put their sums in a place."""

    number: int
    place: int
    clients: list[Client]


_ORDER = decoder(_Order)


class _Shared:
    """The memory that all processes share: what clients receive in every trip, and places for the sums of blocks."""

    def __init__(self, received: Sequence[Mapping[str, Tensor]], layouts: Sequence[SumsLayout], places: int) -> None:
        self.layouts = layouts
        self._received = [{name: shared_zeros((len(old),)) for name, old in trip.items()} for trip in received]
        self._places = [shared_zeros((max(layout.size for layout in layouts),), torch.float64) for _ in range(places)]

    def received(self, number: int) -> dict[str, Tensor]:
        """What clients receive in round `number`."""
        return in_turn(self._received, number)

    def part(self, number: int, place: int) -> Tensor:
        """The sums of a block in round `number`, in a place."""
        return self._places[place][: in_turn(self.layouts, number).size]


class Processes:
    """Processes that train blocks, longest clients first. They start when they are needed, and end with this object.

    makes: one function for each process, which makes its trainer in it. received: what clients receive in every trip,
    for the sizes.
    """

    def __init__(
        self,
        makes: Sequence[Callable[[], ClientTrainer]],
        layouts: Sequence[SumsLayout],
        received: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._makes = makes
        self._places = AHEAD * len(makes)
        self._shared = _Shared(received, layouts, self._places)
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end, self._workers)

    def train(self, number: int, received: Mapping[str, Tensor], blocks: Blocks) -> RoundSums:
        """Train blocks, as many at a time as there are processes: see CohortTrainer."""
        for name, vector in self._shared.received(number).items():
            vector.copy_(received[name])
        for make in self._makes[len(self._workers) : len(blocks)]:
            self._workers.append(_Worker(make, self._shared))
        layout = in_turn(self._shared.layouts, number)
        sums = RoundSums(layout, torch.empty(layout.size, dtype=torch.float64))
        try:
            for part in self._in_order(number, blocks):
                sums.vector += part
        except BaseException:
            _end(self._workers)  # some may still be at work on this round
            raise
        return sums

    def _in_order(self, number: int, blocks: Blocks) -> Iterator[Tensor]:
        """The sums of the blocks, in the order of the blocks; their place is used again once the next are asked for."""
        idle, busy = deque(self._workers), dict[_Worker, int]()

        def start(block: int) -> None:
            worker = idle.popleft()
            worker.send(msgspec.json.encode(_Order(number, block % self._places, list(blocks[block]))))
            busy[worker] = block

        def ended() -> Iterator[tuple[int, Tensor]]:
            answered = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in answered]:
                worker.finish()
                block = busy.pop(worker)
                idle.append(worker)
                yield block, self._shared.part(number, block % self._places)

        return in_order(len(blocks), len(self._makes), idle, start, ended)


class _Worker(Forked):
    """A process that trains blocks."""

    def __init__(self, make: Callable[[], ClientTrainer], shared: _Shared) -> None:
        super().__init__(functools.partial(_work, make, shared))

    def finish(self) -> None:
        """Take its answer. Raises EngineError or ExportError when it could not do it, and ProcessDied."""
        if (failure := self.answer().failure) is not None:
            raise failure.raised()


def _work(make: Callable[[], ClientTrainer], shared: _Shared, pipe: Connection) -> None:
    """Train what is ordered, until nobody holds the other end of the pipe any more."""
    keep_freed_memory()
    trainer = None
    while True:
        try:
            order = _ORDER.decode(pipe.recv_bytes())
        except EOFError:
            return
        try:
            trainer = trainer or make()
            layout = in_turn(shared.layouts, order.number)
            sums = RoundSums(layout, shared.part(order.number, order.place))
            trainer.train(order.number, shared.received(order.number), order.clients, sums)
            answer = Answer()  # the sums are in their place
        except Exception as error:  # whatever the user's own code raises
            answer = Answer(failure=Failure.of(error))
        pipe.send_bytes(msgspec.json.encode(answer))


def _end(workers: list[_Worker]) -> None:
    """End processes, whatever they work on."""
    for worker in workers:
        worker.end()
    workers.clear()


def usable_cores() -> int:
    """The cores that this process may use; 1 but on Linux, as it is not safe to fork a process with torch elsewhere."""
    return min(len(os.sched_getaffinity(0)), _quota()) if sys.platform == "linux" else 1


def _quota() -> int:
    """The cores whose time the control group of a container grants, rounded up."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):  # no control group, or one of version 1
        return sys.maxsize
    return sys.maxsize if quota == "max" else math.ceil(int(quota) / int(period))
