"""The process from which emulated devices are forked: it has the device runtime loaded, and nothing else of ours.

One line of JSON on standard input starts one device, which is an operating-system process of its own and runs one
session of the real device runtime. One line on standard output says how it ended. Closing standard input ends all.
The arguments name the backends to load. Loading them and the runtime once makes a device cost a fork instead of an
interpreter (docs/decisions/0007-forked-devices.md).
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # what resolving a host's name loads
import gc
import os
import selectors
import signal
import sys
from pathlib import Path

import msgspec

import device_runtime.secure  # noqa: F401  # a device loads it when a round asks for it; let every child inherit it
from device_runtime.backends import BACKENDS
from device_runtime.errors import DeviceError
from device_runtime.outcome import Outcome
from device_runtime.session import DeviceConfig, run_session
from device_runtime.transport import Transport
from fedcore.batching import Place, permutation
from fedcore.decoding import decoder
from secagg.keys import PairKey
from simulator import emulated
from simulator.emulated import Fate, Traits
from simulator.witness import Witness


class Start(msgspec.Struct, frozen=True):
    """Start one session of one device, of a fleet that `began` at that time of the machine's monotonic clock.

    witness: the folder in which to write down what it quantises, sends and reveals in a secure round, if any.
    """

    client: str
    coordinator: str
    population: str
    examples: str
    state: str
    wait_s: float
    backend: str
    began: float
    traits: Traits
    fate: Fate
    witness: str | None = None


class Ended(msgspec.Struct, frozen=True):
    """How a session ended; `outcome` is missing when the process died first, with `exit_code` negative for a signal."""

    client: str
    outcome: Outcome | None
    exit_code: int


_START = decoder(Start)
_OUTCOME = decoder(Outcome)


class Emulator:
    """Forks devices and relays their outcomes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, str]] = {}

    def run(self) -> None:
        """Serve until standard input closes."""
        try:
            self._serve()
        finally:
            self._stop()

    def _serve(self) -> None:
        os.set_blocking(sys.stdin.fileno(), False)
        pending = b""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._children:
                    self._finish(key.fd)
                    continue
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._start(_START.decode(line))

    def _start(self, start: Start) -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _be_device(start, writer)
        os.close(writer)
        self._children[reader] = (child, start.client)
        self._selector.register(reader, selectors.EVENT_READ)

    def _finish(self, reader: int) -> None:
        child, client = self._children.pop(reader)
        self._selector.unregister(reader)
        with os.fdopen(reader, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(child, 0)
        outcome = _OUTCOME.decode(data) if data else None
        ended = Ended(client, outcome, os.waitstatus_to_exitcode(status))
        os.write(sys.stdout.fileno(), msgspec.json.encode(ended) + b"\n")

    def _stop(self) -> None:
        for child, _ in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)


def _be_device(start: Start, writer: int) -> None:
    """The forked child: one session, its outcome into the pipe, then out without the parent's clean-up."""
    code = 1
    # The pipes of the emulator are not the device's: a print would corrupt its words, an open end outlive it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    try:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(msgspec.json.encode(run_session(_config(start), start.traits.clock())))
        code = 0
    finally:
        os._exit(code)


def _config(start: Start) -> DeviceConfig:
    witness = None if start.witness is None else Witness(Path(start.witness))
    if witness is not None:
        witness.attend()
    return DeviceConfig(
        coordinator=start.coordinator,
        population=start.population,
        examples=Path(start.examples),
        state=Path(start.state),
        wait_s=start.wait_s,
        backend=start.backend,
        conditions=start.traits.source(start.began),
        requirements=start.traits.requirements,
        connect=emulated.connect(start.traits, start.fate, witness),
        load_backend=emulated.load_backend(start.traits, start.fate),
    )


def _warm() -> None:
    """Do once what the first session of a process would, so that every child inherits it: a quarter of its work."""
    with Transport.to("http://localhost"):
        pass  # the HTTP library loads half of itself with its first client
    permutation(Place(0, 0, 0), 0, 0, 1)
    PairKey(bytes(range(32)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the fleet decides when to stop
    _warm()
    try:
        for name in sys.argv[1:]:
            BACKENDS[name]()
    except DeviceError as error:
        sys.exit(f"error: {error}")
    gc.freeze()  # keep the shared pages of the loaded runtime out of the children's collections
    Emulator().run()
