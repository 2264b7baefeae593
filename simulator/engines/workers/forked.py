"""Forked processes: they share all that is in memory, return blocks in order, and say why they failed.

On Linux they end with the thread that forked them, however that ends.
Where torch sees a GPU, the first gradient starts threads that a fork does not take along. From then on torch refuses
gradients in every process that is forked. So a process that is to fork others for gradients computes none itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import msgspec
import torch

from export.errors import ExportError, reason
from fedcore.validation import decoder
from simulator.engines.memory import keep_freed_memory
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
