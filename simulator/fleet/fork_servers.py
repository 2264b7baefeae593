"""Hosts of emulated devices: a fork server for each architecture, here or under qemu, and Node for TypeScript."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

import device_runtime
from fedcore.validation import decoder
from simulator.errors import FleetError
from simulator.fleet import arm, browsers
from simulator.fleet.fork_server import Ended, Start

FOLDER = Path(device_runtime.__file__).parent / "js"
_FLEET = FOLDER / "src" / "node" / "fleet.ts"


def fleet_command() -> list[str]:
    """The command line of a process that runs many devices, as a fork server does. Raises FleetError."""
    return [program(), "--no-warnings", str(_FLEET)]


def program() -> str:
    """The path of Node, if it can run the device runtime in TypeScript. Raises FleetError, saying what is missing."""
    if not _FLEET.exists():
        raise FleetError(f"there is no device runtime in TypeScript at {FOLDER}: run this from a checkout of Muster")
    path = shutil.which("node")
    is_new = [path or "", str(FOLDER / "node-is-new.cjs")]
    if path is None or subprocess.run(is_new, check=False, capture_output=True).returncode != 0:
        what = f"{path} is older" if path else "there is none on the PATH"
        raise FleetError(
            f"devices on Node need Node 22.18 or newer, and {what}: `npm install --global node@24` has one"
        )
    if not (FOLDER / "node_modules" / ".package-lock.json").exists():
        raise FleetError(f"devices on Node need their packages: `npm ci --prefix {FOLDER}` installs them")
    return path


_ENDED = decoder(Ended)

HERE: str = platform.machine()
NODE, BROWSER = "node", "browser"
DIED = "a process that runs emulated devices died; standard error says why"

StartSession = Callable[[str, Start], None]
"""Starts a session at a host: an architecture, NODE or BROWSER."""
EndedSessions = queue.SimpleQueue[Ended | None]
"""Ends of sessions at all hosts; None once a host has died."""
ForkServers = tuple[StartSession, EndedSessions]
"""The hosts of devices, for one fleet at a time."""


def architectures() -> tuple[str, ...]:
    """The architectures of devices: this machine's own first, then those that can be emulated."""
    return tuple(dict.fromkeys((HERE, arm.ARCH)))


@contextlib.contextmanager
def fork_servers(backends: Mapping[str, Sequence[str]]) -> Iterator[ForkServers]:
    """A host for every name in `backends`: NODE, BROWSER, and architectures with the backends that their devices load.

    Raises SysrootError when an architecture cannot be emulated here yet, or not with these backends, and FleetError if
    Node or a browser is needed and missing.
    """
    ended: EndedSessions = queue.SimpleQueue()
    commands = {host: _command(host, names) for host, names in backends.items()}
    with contextlib.ExitStack() as stack:
        starts = {host: stack.enter_context(_process(*command, ended)) for host, command in commands.items()}
        yield lambda host, start: starts[host](start), ended


def _command(host: str, backends: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a host."""
    if host == NODE:
        return fleet_command(), dict(os.environ)
    if host == BROWSER:
        return browsers.command(), dict(os.environ)
    arguments = ["-m", "simulator.fleet.fork_server", *backends]
    if host == HERE:
        return [sys.executable, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    machine = arm.ready()
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
