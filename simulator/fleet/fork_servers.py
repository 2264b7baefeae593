"""Fork servers of emulated devices: one process for each architecture, on this machine or under qemu."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from fedcore.decoding import decoder
from simulator.errors import FleetError
from simulator.fleet.arm import sysroot
from simulator.fleet.fork_server import Ended, Start

_ENDED = decoder(Ended)

HERE: str = platform.machine()
DIED = "the emulator process died; its last words are on standard error"

Wake = Callable[[str, Start], None]
"""Wake a device on a machine of this architecture."""
Ends = queue.SimpleQueue[Ended | None]
"""How sessions ended, of all machines; None once a process is gone."""
Machines = tuple[Wake, Ends]
"""Where devices run, for one fleet at a time."""


def architectures() -> tuple[str, ...]:
    """What devices can be: this machine's own architecture first, then those that can be emulated."""
    return tuple(dict.fromkeys((HERE, sysroot.ARCH)))


@contextlib.contextmanager
def emulators(backends: Mapping[str, Sequence[str]]) -> Iterator[Machines]:
    """An emulator process for every architecture in `backends`, which says what each loads for its devices.

    Raises SysrootError when an architecture cannot be emulated here yet, or not with these backends.
    """
    ends: Ends = queue.SimpleQueue()
    commands = {arch: _command(arch, names) for arch, names in backends.items()}
    with contextlib.ExitStack() as stack:
        wakes = {arch: stack.enter_context(_process(*command, ends)) for arch, command in commands.items()}
        yield lambda arch, start: wakes[arch](start), ends


def _command(arch: str, backends: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of an emulator."""
    arguments = ["-m", "simulator.fleet.fork_server", *backends]
    if arch == HERE:
        return [sys.executable, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    machine = sysroot.ready()
    machine.check(backends)
    return machine.python(*arguments), machine.environment()


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], ends: Ends) -> Iterator[Callable[[Start], None]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise FleetError("the emulator process has no pipes")

    def read() -> None:
        for line in stdout:
            ends.put(_ENDED.decode(line))
        ends.put(None)

    def wake(start: Start) -> None:
        try:
            stdin.write(msgspec.json.encode(start) + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise FleetError(DIED) from error

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield wake
    finally:
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        process.wait()
        reader.join()
        stdout.close()
