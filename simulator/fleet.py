"""A fleet of emulated devices: each a process that runs the real device runtime against a real coordinator."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from device_runtime.backends import BACKENDS
from device_runtime.outcome import Outcome
from device_runtime.scheduler import default_window
from fedcore.wire.messages import RetryWindow
from simulator.emulator import Ended, Start
from simulator.emulators import DIED, HERE, Ends, architectures, emulators
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

    Devices take turns: the first is of the first of `archs` and runs the first of `backends`, the next runs the second,
    and after the last backend comes the next architecture, round and round. Another architecture than this machine's
    runs under qemu (docs/emulators.md).
    """

    coordinator: str
    population: str
    folder: Path
    concurrency: int = 20
    sessions: int | None = None
    wait_s: float = 30.0
    seed: int = 0
    backends: tuple[str, ...] = ("onnxruntime",)
    archs: tuple[str, ...] = (HERE,)


@dataclass(slots=True)
class FleetSummary:
    """What happened: sessions by outcome, bytes over all devices, who reported, and the client of each device id.

    by: sessions by outcome, for every "<architecture> <backend>".
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    by: dict[str, Counter[str]] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    clients: dict[str, str] = field(default_factory=dict)
    participants: set[str] = field(default_factory=set)

    def add(self, client: str, outcome: Outcome) -> None:
        """Count one session."""
        self.outcomes[outcome.outcome] += 1
        self.by.setdefault(f"{outcome.arch} {outcome.backend}", Counter())[outcome.outcome] += 1
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
        _check("backend", config.backends, tuple(BACKENDS))
        _check("architecture", config.archs, architectures())
        self._config = config
        self._random = random.Random(config.seed)
        self._asleep = dict.fromkeys(population.clients, 0.0)
        kinds = itertools.cycle(itertools.product(config.archs, config.backends))
        self._kinds = dict(zip(population.clients, kinds, strict=False))
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
        Raises FleetError when session after session fails: there is no coordinator, say, or no such population; and
        SysrootError when devices of an architecture cannot run here.
        """
        summary, awake, started = FleetSummary(), 0, 0
        loaded: dict[str, list[str]] = {}
        for arch, backend in dict.fromkeys(self._kinds.values()):
            loaded.setdefault(arch, []).append(backend)
        with emulators(loaded) as (wake, ended):
            while True:
                while awake < self._config.concurrency and not self._done and started != self._config.sessions:
                    client = self._next()
                    if client is None:
                        break
                    wake(self._kinds[client][0], self._start(client))
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
            backend=self._kinds[client][1],
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

    def _wait(self, ended: Ends, *, full: bool) -> Ended | None:
        """The next ended session, or None when a sleeping device may wake first."""
        now = time.monotonic()
        until = now + 1 if full else min(self._asleep.values(), default=now + 1)
        try:
            report = ended.get(timeout=max(0.01, min(until - now, 1.0)))
        except queue.Empty:
            return None
        if report is None:
            raise FleetError(DIED)
        return report

    def _settle(self, report: Ended) -> Outcome:
        """Put the device to sleep for its retry window, and notice the end of work."""
        arch, backend = self._kinds[report.client]
        died = Outcome(reason="process-died", detail=f"exit code {report.exit_code}", retryable="transient")
        outcome = report.outcome or replace(died, arch=arch, backend=backend)
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


def _check(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise FleetError(f"no {what} is called {', '.join(map(repr, unknown))}; there are {', '.join(known)}")


def _retry_window(outcome: Outcome) -> RetryWindow:
    if outcome.retry is not None:
        return outcome.retry
    if outcome.outcome in {"reported", "not-needed"}:
        return RetryWindow(0.0, 0.0)
    return AFTER_FAILURE if outcome.retryable == "transient" else default_window(outcome)
