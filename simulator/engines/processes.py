"""Processes that train the blocks of a cohort: forked, so that they share memory, or on a Ray cluster.

On Linux they end with the thread that forked them, however that ends.
Where torch sees a GPU, the first gradient starts threads that a fork does not take along. From then on torch refuses
gradients in every process that is forked. So a process that is to fork others for gradients computes none itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from export.errors import ExportError, reason
from fedcore.plan import in_turn
from fedcore.validation import decoder
from simulator.engines.memory import keep_freed_memory, shared_zeros
from simulator.engines.sums import Client, ClientTrainer, RoundSums, SumsLayout
from simulator.errors import EngineError, ProcessDied


class Failure(msgspec.Struct, frozen=True):
    """What went wrong in another process, in words. of_model: with the user's model, as ExportError says."""

    words: str
    of_model: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Of whatever was raised; its kind is in the words where neither the engine nor the exporter raised it."""
        ours = isinstance(error, (EngineError, ExportError))
        return cls(str(error) if ours else reason(error), isinstance(error, ExportError))

    def raised(self) -> EngineError | ExportError:
        """The error to raise in this process."""
        return ExportError(self.words) if self.of_model else EngineError(self.words)


T = TypeVar("T")
AHEAD = 2
"""So many blocks for each worker are under way: the sums of one wait until those of all before it are added."""


def in_order(
    count: int,
    workers: int,
    idle: Collection[object],
    start: Callable[[int], None],
    ended: Callable[[], Iterable[tuple[int, T | None]]],
) -> Iterator[T]:
    """What each of `count` blocks ends with, in the order of the blocks; AHEAD · `workers` at most are under way.

    idle: the workers that have nothing to do. start: gives one of them a block. ended: waits, and gives the blocks that
    ended with what they ended with; None for one that has to be started again.
    """
    waiting, done = deque(range(count)), dict[int, T]()
    for wanted in range(count):
        while wanted not in done:
            while idle and waiting and waiting[0] < wanted + AHEAD * workers:
                start(waiting.popleft())
            for block, end in ended():
                if end is None:
                    waiting.appendleft(block)
                else:
                    done[block] = end
        yield done.pop(wanted)


class Answer(msgspec.Struct, frozen=True):
    """The result of a computation, as JSON, or why there is none."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None


_ANSWER = decoder(Answer)


# <linux/prctl.h>: the signal that a process gets when the thread that started it ends.
PR_SET_PDEATHSIG = 1


class Forked:
    """A forked process that runs `main` on its end of a pipe, and this end of the pipe."""

    def __init__(self, main: Callable[[Connection], None]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self._process: BaseProcess = fork.Process(target=_live, args=(main, theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: bytes) -> None:
        """Send it a message. Raises ProcessDied when it is no more."""
        try:
            self.pipe.send_bytes(message)
        except OSError as error:
            raise self._ended() from error

    def answer(self) -> Answer:
        """Wait for its answer. Raises ProcessDied when it is no more."""
        try:
            return _ANSWER.decode(self.pipe.recv_bytes())
        except (OSError, EOFError) as error:
            raise self._ended() from error

    def end(self) -> None:
        """End it: what it works on is of no use any more."""
        self.pipe.close()
        self._process.kill()
        self._process.join()

    def _ended(self) -> ProcessDied:
        self._process.join()
        code = self._process.exitcode
        killed = code == -signal.SIGKILL
        hint = "; this usually means that the memory was full, which fewer --processes need less of" if killed else ""
        return ProcessDied(f"a process of the engine ended with exit code {code}{hint}")


def with_kept(
    kept: Sequence[T | None], computations: Sequence[Callable[[], T]], read: msgspec.json.Decoder[T], processes: int
) -> Iterator[tuple[int, T | EngineError | ExportError | ProcessDied]]:
    """How each computation ends, as `ended_each`, but those whose result is kept are not computed, and come first."""
    yield from ((index, end) for index, end in enumerate(kept) if end is not None)
    missing = [index for index, end in enumerate(kept) if end is None]
    for position, end in ended_each([computations[index] for index in missing], read, processes):
        yield missing[position], end


def compute_apart(compute: Callable[[], T], read: msgspec.json.Decoder[T]) -> T:
    """What `compute` gives, computed in a forked process, which ends then. Raises the errors of `ended_each`."""
    ((_, end),) = ended_each([compute], read, 1)
    if isinstance(end, EngineError | ExportError | ProcessDied):
        raise end
    return end


def ended_each(
    computations: Sequence[Callable[[], T]], read: msgspec.json.Decoder[T], processes: int
) -> Iterator[tuple[int, T | EngineError | ExportError | ProcessDied]]:
    """How each computation ends, after its index, in the order in which they end; each in a forked process.

    That is what it gives, or an error: the words of whatever was raised there, or that its process was killed.
    read: the decoder of what they give. processes: how many run at a time.
    """
    waiting = deque(enumerate(computations))
    busy: dict[Connection, tuple[int, Forked]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < processes:
                index, compute = waiting.popleft()
                process = Forked(functools.partial(_answer, compute))
                busy[process.pipe] = index, process
            for pipe in [pipe for pipe in wait(list(busy)) if isinstance(pipe, Connection)]:
                index, process = busy[pipe]
                end = _end(process, read)
                del busy[pipe]
                process.end()
                yield index, end
    finally:
        for _, process in busy.values():
            process.end()


def _end(process: Forked, read: msgspec.json.Decoder[T]) -> T | EngineError | ExportError | ProcessDied:
    """What a process that answered gave, or why it gave nothing."""
    try:
        result = process.answer()
    except ProcessDied as died:
        return died
    return read.decode(result.value) if result.failure is None else result.failure.raised()


def _answer(compute: Callable[[], object], pipe: Connection) -> None:
    keep_freed_memory()
    try:
        result = Answer(msgspec.Raw(msgspec.json.encode(compute())))
    except Exception as error:  # whatever the user's own code raises
        result = Answer(failure=Failure.of(error))
    pipe.send_bytes(msgspec.json.encode(result))


def _live(main: Callable[[Connection], None], pipe: Connection, parent: int) -> None:
    """The whole life of a process: it lets go of what it inherited, and runs `main`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # which ended before
            os._exit(1)
    # Whatever else is open in the process that forked it, such as the pipes to other processes, is not to be held here.
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != pipe.fileno():
            with contextlib.suppress(OSError):  # the folder that was just read
                os.close(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that forked this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    main(pipe)


# Processes that train the blocks of a cohort, with one thread each: no result depends on how many there are.
#
# They are forked, so that all share the examples. What clients receive, and the sums of blocks, lie in memory that is
# shared too, and pipes carry only which block is whose.


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
        weakref.finalize(self, _end_workers, self._workers)

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
            _end_workers(self._workers)  # some may still be at work on this round
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


def _end_workers(workers: list[_Worker]) -> None:
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


# The Ray cluster that a training runs on: how this process connects to it, and how many workers it has room for.


# A cluster's head answers within so many seconds, or not at all.
ANSWER_S = 5.0
# It speaks gRPC: the server's first frame is of the type SETTINGS (RFC 9113, section 3.4).
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HTTP2_SETTINGS = b"\x04"


def connect(address: str, workers: int | None, *, on_gpus: bool = False) -> int:
    """Connect this process to a cluster; gives how many workers are to train: `workers`, or one for each of its CPUs.

    on_gpus: or of its GPUs, which each worker gets one of, beside a CPU. address: "auto", the cluster that
    this machine is part of; "local", a new one on this machine, which ends with this process; or HOST:PORT, where the
    head of a cluster listens. A connection that this process has already is used as it is.
    Raises EngineError when Ray is not installed, or there is no such cluster, or it has too few CPUs or GPUs.
    """
    if find_spec("ray") is None:
        raise EngineError("ray is not installed: pip install 'muster-fl[ray]'")
    _check_address(address)
    import ray  # an extra, and it takes a second

    if not ray.is_initialized():
        local = address == "local"
        ours: dict[str, Any] = {"num_cpus": workers or usable_cores(), "include_dashboard": False} if local else {}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what is started here tells its makers nothing
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **ours)
        except Exception as error:  # of several kinds, by what is wrong
            what = "start a Ray cluster on this machine" if local else f"join the Ray cluster {address!r}"
            raise EngineError(f"cannot {what}: {reason(error)}") from error
    kind = "GPU" if on_gpus else "CPU"
    there = int(ray.cluster_resources().get(kind, 0))  # type: ignore[no-untyped-call]
    if there < (workers or 1):
        raise EngineError(
            f"the Ray cluster has {there} {kind}s, and {workers or 1} workers need one each; add machines to it, or "
            "take fewer --processes"
        )
    return workers or there


def _check_address(address: str) -> None:
    """Raise EngineError when an address has another form, or nothing answers there: Ray itself waits for minutes."""
    if address in {"auto", "local"}:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise EngineError(f"a Ray cluster is auto, local or HOST:PORT, such as 192.0.2.1:6379, not {address!r}")
    try:
        with socket.create_connection((host, int(port)), ANSWER_S) as connection:
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(4)
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"no Ray cluster answers at {address}: {error}; `ray start --head` on a machine begins one, and says its "
            "address"
        ) from error
    if answer[3:] != HTTP2_SETTINGS:
        raise EngineError(
            f"something else than a Ray cluster answers at {address}; its own port is 6379, if not chosen"
        )
