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
DIED = "the fork server of emulated devices died; standard error says why"

StartSession = Callable[[str, Start], None]
"""Starts a session in the fork server of an architecture."""
EndedSessions = queue.SimpleQueue[Ended | None]
"""Ends of sessions, of all fork servers; None once a fork server has died."""
ForkServers = tuple[StartSession, EndedSessions]
"""Where devices run, for one fleet at a time."""


def architectures() -> tuple[str, ...]:
    """The architectures of devices: this machine's own first, then those that can be emulated."""
    return tuple(dict.fromkeys((HERE, sysroot.ARCH)))


@contextlib.contextmanager
def fork_servers(backends: Mapping[str, Sequence[str]]) -> Iterator[ForkServers]:
    """A fork server for every architecture in `backends`, which names the backends that each loads for its devices.

    Raises SysrootError when an architecture cannot be emulated here yet, or not with these backends.
    """
    ended: EndedSessions = queue.SimpleQueue()
    commands = {arch: _command(arch, names) for arch, names in backends.items()}
    with contextlib.ExitStack() as stack:
        starts = {arch: stack.enter_context(_process(*command, ended)) for arch, command in commands.items()}
        yield lambda arch, start: starts[arch](start), ended


def _command(arch: str, backends: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a fork server."""
    arguments = ["-m", "simulator.fleet.fork_server", *backends]
    if arch == HERE:
        return [sys.executable, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    machine = sysroot.ready()
    machine.check(backends)
    return machine.python(*arguments), machine.environment()


@contextlib.contextmanager
def _process(
    command: list[str], environment: dict[str, str], ended: EndedSessions
) -> Iterator[Callable[[Start], None]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise FleetError("the fork server has no pipes")

    def read() -> None:
        for line in stdout:
            ended.put(_ENDED.decode(line))
        ended.put(None)

    def send(start: Start) -> None:
        try:
            stdin.write(msgspec.json.encode(start) + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise FleetError(DIED) from error

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield send
    finally:
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        process.wait()
        reader.join()
        stdout.close()
