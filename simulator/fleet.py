"""A fleet of emulated devices: each a process that runs the real device runtime against a real coordinator."""

from __future__ import annotations

import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from device_runtime.session import Outcome
from simulator.emulator import Ended, Start
from simulator.errors import FleetError
from simulator.population import Population

# So many sessions in a row that reached no coordinator mean that there is none.
MAX_FAILURES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Which devices, and where they check in. At most `concurrency` devices are awake at a time."""

    coordinator: str
    population: str
    folder: Path
    concurrency: int = 20
    sessions: int | None = None
    wait_s: float = 30.0
    seed: int = 0


@dataclass(slots=True)
class FleetSummary:
    """What happened: sessions by outcome, bytes over all devices, and which client each device id that reported is."""

    outcomes: Counter[str] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0
    participants: dict[str, str] = field(default_factory=dict)

    def add(self, client: str, outcome: Outcome) -> None:
        """Count one session."""
        self.outcomes[outcome.outcome] += 1
        self.bytes_up += outcome.bytes_up
        self.bytes_down += outcome.bytes_down
        if outcome.outcome == "reported":
            self.participants[outcome.device] = client


class Fleet:
    """Devices of a population on disk, woken at random as a coordinator needs them."""

    def __init__(self, config: FleetConfig, population: Population) -> None:
        if config.concurrency < 1:
            raise FleetError(f"at least one device must be awake, not {config.concurrency}")
        self._config = config
        self._random = random.Random(config.seed)
        self._asleep = dict.fromkeys(population.clients, 0.0)
        self._failures = 0
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
        with _emulator() as (wake, ended):
            while True:
                while awake < self._config.concurrency and not self._done and started != self._config.sessions:
                    client = self._next()
                    if client is None:
                        break
                    wake(self._start(client))
                    awake, started = awake + 1, started + 1
                if awake == 0 and (self._done or started == self._config.sessions):
                    return summary
                report = self._wait(ended)
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

    def _wait(self, ended: queue.SimpleQueue[Ended | None]) -> Ended | None:
        """The next ended session, or None when a sleeping device may wake first."""
        until = min(self._asleep.values(), default=time.monotonic() + 1)
        try:
            report = ended.get(timeout=max(0.01, min(until - time.monotonic(), 1.0)))
        except queue.Empty:
            return None
        if report is None:
            raise FleetError("the emulator process died; its last words are on standard error")
        return report

    def _settle(self, report: Ended) -> Outcome:
        """Put the device to sleep for its retry window, and notice the end of work."""
        outcome = report.outcome or Outcome(reason="process-died", detail=f"exit code {report.exit_code}")
        window = outcome.retry
        delay = self._random.uniform(window.min_s, window.max_s) if window is not None else 0.0
        self._asleep[report.client] = time.monotonic() + delay
        self._done = self._done or outcome.reason == "no-task"
        self._failures = self._failures + 1 if outcome.outcome == "failed" else 0
        if self._failures >= MAX_FAILURES:
            raise FleetError(f"{MAX_FAILURES} sessions in a row failed; the last: {outcome.reason}: {outcome.detail}")
        return outcome


@contextmanager
def _emulator() -> Iterator[tuple[Callable[[Start], None], queue.SimpleQueue[Ended | None]]]:
    """An emulator process: a way to wake devices, and the queue of ended sessions (None once the process is gone)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "simulator.emulator"],
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
        stdin.close()
        process.wait()
        reader.join()
        stdout.close()
