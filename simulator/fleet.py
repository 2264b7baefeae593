"""A fleet of emulated devices: each a process that runs the real device runtime against a real coordinator."""

from __future__ import annotations

import itertools
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from device_runtime.backends import BACKENDS
from device_runtime.outcome import Outcome
from device_runtime.scheduler import default_window
from fedcore.wire.messages import RetryWindow
from simulator.emulator import Ended, Start
from simulator.errors import FleetError
from simulator.population import Population

# So many failed sessions before the first good one, and so long without one later, mean that there is no coordinator.
MAX_FAILURES = 20
PATIENCE_S = 60.0
# A failed device comes back after so long: minutes would be right for a phone and wrong for who watches a fleet.
AFTER_FAILURE = RetryWindow(0.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Which devices, and where they check in. At most `concurrency` devices are awake at a time.

    backends: the first device runs the first, the next the second, and so on, round and round.
    """

    coordinator: str
    population: str
    folder: Path
    concurrency: int = 20
    sessions: int | None = None
    wait_s: float = 30.0
    seed: int = 0
    backends: tuple[str, ...] = ("onnxruntime",)


@dataclass(slots=True)
class FleetSummary:
    """What happened: sessions by outcome, bytes over all devices, who reported, and the client of each device id."""

    outcomes: Counter[str] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0
    clients: dict[str, str] = field(default_factory=dict)
    participants: set[str] = field(default_factory=set)

    def add(self, client: str, outcome: Outcome) -> None:
        """Count one session."""
        self.outcomes[outcome.outcome] += 1
        self.bytes_up += outcome.bytes_up
        self.bytes_down += outcome.bytes_down
        if outcome.device:
            self.clients[outcome.device] = client
        if outcome.outcome == "reported":
            self.participants.add(client)


class Fleet:
    """Devices of a population on disk, woken at random as a coordinator needs them."""

    def __init__(self, config: FleetConfig, population: Population) -> None:
        if config.concurrency < 1:
            raise FleetError(f"at least one device must be awake, not {config.concurrency}")
        unknown = [name for name in config.backends if name not in BACKENDS]
        if unknown or not config.backends:
            raise FleetError(f"no backend is called {', '.join(map(repr, unknown))}; there are {', '.join(BACKENDS)}")
        self._config = config
        self._random = random.Random(config.seed)
        self._asleep = dict.fromkeys(population.clients, 0.0)
        self._backends = dict(zip(population.clients, itertools.cycle(config.backends), strict=False))
        self._devices, self._failures = len(population), 0
        self._last_success: float | None = None
        self._done = False
        for index, client in enumerate(population.clients):
            folder = config.folder / client
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(folder / "examples.npz", **population.shard(index))  # type: ignore[arg-type]

    def run(self, on_outcome: Callable[[str, Outcome], None] = lambda client, outcome: None) -> FleetSummary:
        """Wake devices until the population has no more work, or `sessions` have ended.

        A device process that dies is an outcome like any other ("failed", reason "process-died").
        Raises FleetError when session after session fails: there is no coordinator, say, or no such population.
        """
        summary, awake, started = FleetSummary(), 0, 0
        with _emulator(self._config.backends) as (wake, ended):
            while True:
                while awake < self._config.concurrency and not self._done and started != self._config.sessions:
                    client = self._next()
                    if client is None:
                        break
                    wake(self._start(client))
                    awake, started = awake + 1, started + 1
                if awake == 0 and (self._done or started == self._config.sessions):
                    return summary
                report = self._wait(ended, full=awake == self._config.concurrency)
                if report is not None:
                    awake -= 1
                    outcome = self._settle(report)
                    summary.add(report.client, outcome)
                    on_outcome(report.client, outcome)

    def _start(self, client: str) -> Start:
        config, folder = self._config, self._config.folder / client
        return Start(
            client=client,
            coordinator=config.coordinator,
            population=config.population,
            examples=str(folder / "examples.npz"),
            state=str(folder / "state"),
            wait_s=config.wait_s,
            backend=self._backends[client],
        )

    def _next(self) -> str | None:
        """A device that may wake, drawn at random, or None when all sleep on."""
        now = time.monotonic()
        ready = [client for client, until in self._asleep.items() if until <= now]
        if not ready:
            return None
        client = self._random.choice(ready)
        del self._asleep[client]
        return client

    def _wait(self, ended: queue.SimpleQueue[Ended | None], *, full: bool) -> Ended | None:
        """The next ended session, or None when a sleeping device may wake first."""
        now = time.monotonic()
        until = now + 1 if full else min(self._asleep.values(), default=now + 1)
        try:
            report = ended.get(timeout=max(0.01, min(until - now, 1.0)))
        except queue.Empty:
            return None
        if report is None:
            raise FleetError("the emulator process died; its last words are on standard error")
        return report

    def _settle(self, report: Ended) -> Outcome:
        """Put the device to sleep for its retry window, and notice the end of work."""
        detail = f"exit code {report.exit_code}"
        outcome = report.outcome or Outcome(reason="process-died", detail=detail, retryable="transient")
        window = _retry_window(outcome)
        now = time.monotonic()
        self._asleep[report.client] = now + self._random.uniform(window.min_s, window.max_s)
        self._done = self._done or outcome.reason == "no-task"
        if outcome.outcome != "failed":
            self._failures, self._last_success = 0, now
            return outcome
        self._failures += 1
        hopeless = self._failures >= min(MAX_FAILURES, self._devices)
        if self._last_success is not None:
            hopeless = hopeless and now - self._last_success > PATIENCE_S
        if hopeless:
            raise FleetError(f"{self._failures} sessions in a row failed; the last: {outcome.reason}: {outcome.detail}")
        return outcome


def _retry_window(outcome: Outcome) -> RetryWindow:
    if outcome.retry is not None:
        return outcome.retry
    if outcome.outcome in {"reported", "not-needed"}:
        return RetryWindow(0.0, 0.0)
    return AFTER_FAILURE if outcome.retryable == "transient" else default_window(outcome)


@contextmanager
def _emulator(
    backends: Sequence[str],
) -> Iterator[tuple[Callable[[Start], None], queue.SimpleQueue[Ended | None]]]:
    """An emulator process: a way to wake devices, and the queue of ended sessions (None once the process is gone).

    backends: what the process loads for all devices.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "simulator.emulator", *backends],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise FleetError("the emulator process has no pipes")
    ended: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stdout:
            ended.put(msgspec.json.decode(line, type=Ended))
        ended.put(None)

    def wake(start: Start) -> None:
        try:
            stdin.write(msgspec.json.encode(start) + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise FleetError("the emulator process died; its last words are on standard error") from error

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield wake, ended
    finally:
        with suppress(BrokenPipeError):
            stdin.close()
        process.wait()
        reader.join()
        stdout.close()
