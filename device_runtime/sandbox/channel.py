"""A process that works for a device: the rights that it gives up, and the channel of messages and arrays."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from device_runtime.errors import RuntimeFailed
from device_runtime.sandbox import kernel
from device_runtime.trainer import Limits, bound
from fedcore.batching import StreamKey
from fedcore.plan import Field
from fedcore.validation import UNDECODABLE, Count, NotNegative, decoder

# Confinement: the rights that a process permanently gives up before it reads a graph, as far as the system allows.
#
# docs/device.md, "Where graphs run"; why: docs/decisions/0030-sandbox.md.


STACK_BYTES = 8 * 2**20


def lacking() -> tuple[str, ...]:
    """The defences that this system lacks or that are not used on it; empty if the sandbox has all of them."""
    if sys.platform == "linux":
        filtered, version = kernel.seccomp_offered(), kernel.landlock_version()
        wanted = 1 if filtered else kernel.WHOLE_LANDLOCK  # the filter refuses what an older version leaves open
        lacks = () if version >= wanted else (f"Landlock {kernel.WHOLE_LANDLOCK} (there is {version or 'none'})",)
        return lacks if filtered else (*lacks, "seccomp")
    return ("a limit on memory",) if sys.platform == "darwin" else ("all but limits on descriptors, time and files",)


def confine(limits: Limits) -> None:
    """Permanently give up what training does not need. Raises RuntimeFailed when an offered defence fails."""
    try:
        if sys.platform == "linux":
            bound(resource.RLIMIT_AS, _beside_data() + limits.memory_bytes)
        _give_up_paths()
        _limit(limits)
        if sys.platform == "linux" and kernel.seccomp_offered():
            kernel.restrict_calls()
    except OSError as error:
        raise RuntimeFailed("the sandbox cannot be closed", str(error)) from error


def _give_up_paths() -> None:
    """Give up paths and other processes. This needs descriptors, so it comes before the limit on them."""
    if sys.platform == "linux":
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if os.geteuid() == 0:  # other users have no capabilities, and a filter around the device may refuse this call
            kernel.drop_capabilities()
        if kernel.landlock_version():
            kernel.restrict_paths()
    elif sys.platform == "darwin":
        message = ctypes.c_char_p()  # <sandbox.h>: kSBXProfilePureComputation, SANDBOX_NAMED
        if ctypes.CDLL(None).sandbox_init(b"pure-computation", ctypes.c_uint64(1), ctypes.byref(message)):
            raise OSError(errno.EPERM, (message.value or b"").decode(errors="replace"))


def _beside_data() -> int:
    """Bytes of this process's address space that are not data: libraries, reserves, and room for the stack to grow.

    The limit on data covers private writable memory, but not shared or read-only memory, nor memory that grows
    downwards.
    So the whole address space has a limit too: the present size without data, plus the allowed data.
    """
    size, *_, data, _ = map(int, Path("/proc/self/statm").read_bytes().split())
    return (size - data) * resource.getpagesize() + STACK_BYTES


def _limit(limits: Limits) -> None:
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))
    limits.bound()
    for kind, later in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 0), (resource.RLIMIT_CPU, 1)):
        soft, hard = resource.getrlimit(kind)
        if soft != hard:  # SIGXCPU comes at the limit, and SIGKILL a second later
            resource.setrlimit(kind, (soft, soft + later))


# The channel between a device and the process that works for it: messages as JSON, and arrays as their bytes.


M = TypeVar("M")
_LENGTH = struct.Struct("!I")
# The longest message, in bytes; graphs and arrays are not messages.
MOST_BYTES = 64 * 2**20
# How often a device checks whether to continue, while the other end is silent.
LOOK_EVERY_S = 0.1


class ArrayKind(msgspec.Struct, frozen=True):
    """An array whose bytes follow a message, in C order: its name, element type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> tuple[ArrayKind, ...]:
        """The kinds of some arrays."""
        return tuple(cls(name, array.dtype.name, array.shape) for name, array in arrays.items())


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """An order to train. Graphs follow, and vectors: broadcast, kept; and examples, also those left out.

    backend: the engine's name. plan: as JSON. graphs: sizes, by name. frozen: a descriptor of
    the process, as of a Job. kept: None before the first round.
    """

    backend: str
    limits: Limits
    plan: msgspec.Raw
    key: StreamKey
    graphs: dict[str, int]
    broadcast: tuple[ArrayKind, ...]
    frozen: int | None
    kept: tuple[ArrayKind, ...] | None
    examples: tuple[ArrayKind, ...]
    left_out: tuple[ArrayKind, ...]


class TextOrder(msgspec.Struct, frozen=True, kw_only=True, tag="tokenize"):
    """An order to make tokens of so many texts of a field. The file of the tokenizer follows, of `size` bytes; the
    lengths of the texts in bytes, int64 (texts,); and the texts.
    """

    limits: Limits
    field: Field
    size: int
    padding: int
    texts: int


class Working(msgspec.Struct, frozen=True, tag="working"):
    """The work continues; `cpu_s` are the CPU seconds of its process so far."""

    cpu_s: NotNegative


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The training is done, after `steps` steps. The float32 values (V,) of the result follow, and what is to be kept,
    in the order of the plan.
    """

    steps: Count


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    """The texts are tokens, `cut` of them without their last ones. The int32 values (n, T) follow."""

    cut: Count


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The work failed with the error of errors.py that has this class name."""

    kind: str
    detail: str
    private: str = ""


Answer: TypeAlias = Working | Done | Tokenized | Failed
ORDER: msgspec.json.Decoder[Order | TextOrder] = decoder(Order | TextOrder)  # type: ignore[arg-type]
ANSWER: msgspec.json.Decoder[Answer] = decoder(Answer)  # type: ignore[arg-type]


class Broken(Exception):
    """The other end is gone, or breaks the protocol."""


class Channel:
    """One end of a pair of connected sockets. `look` is called regularly while it sends or waits."""

    def __init__(self, end: socket.socket, look: Callable[[], None] | None = None) -> None:
        self._socket = end
        self._look = look or (lambda: None)
        end.settimeout(LOOK_EVERY_S if look else None)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises Broken."""
        data = msgspec.json.encode(message)
        self.send_bytes(_LENGTH.pack(len(data)) + data)

    def send_bytes(self, data: bytes | NDArray[Any]) -> None:
        """Send bytes, or those of an array in C order. Raises Broken."""
        whole = memoryview(data) if isinstance(data, bytes) else np.ascontiguousarray(data).data
        rest = whole.cast("B") if whole.nbytes else memoryview(b"")
        while rest:
            self._look()
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                continue
            except OSError as error:
                raise Broken from error

    def receive(self, kind: msgspec.json.Decoder[M]) -> M:
        """The next message. Raises Broken."""
        (size,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if size > MOST_BYTES:
            raise Broken
        try:
            return kind.decode(self.receive_bytes(size))
        except UNDECODABLE as error:
            raise Broken from error

    def receive_bytes(self, size: int) -> bytes:
        """The next `size` bytes. Raises Broken."""
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def receive_array(self, kind: ArrayKind) -> NDArray[Any]:
        """The announced array. Raises Broken."""
        array = np.empty(kind.shape, kind.dtype)
        if array.size:
            self._fill(array.data.cast("B"))
        return array

    def _fill(self, rest: memoryview) -> None:
        while rest:
            self._look()
            try:
                received = self._socket.recv_into(rest)
            except TimeoutError:
                continue
            except OSError as error:
                raise Broken from error
            if not received:
                raise Broken
            rest = rest[received:]
