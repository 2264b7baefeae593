"""A fleet of emulated devices: sessions of the real device runtime against a coordinator, and their summary."""

from __future__ import annotations

import queue
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from device_runtime.backends import BACKENDS
from device_runtime.device import default_window
from device_runtime.errors import Outcome, Phase
from device_runtime.permission.policy import Policy
from device_runtime.protocol.connection import address_of
from device_runtime.state.folder import KeyFile, Sealer, device_key
from fedcore.validation import offered
from fedcore.wire.messages import RetryWindow
from fedcore.wire.signatures import PublicKey, device_id
from simulator.errors import FleetError, ProfileError
from simulator.fleet import browsers
from simulator.fleet.faults import EmulatedDevice, PlannedFailure
from simulator.fleet.fork_server import Ended, Start
from simulator.fleet.fork_servers import (
    BROWSER,
    DIED,
    HERE,
    EndedSessions,
    ForkServers,
    architectures,
    fork_servers,
)
from simulator.fleet.profile import Kind, assign_kinds, equal_kinds
from simulator.planned import as_devices_hold
from simulator.population import Population


@dataclass(frozen=True, slots=True)
class Session:
    """One session of one device of a fleet.

    ending: "reported"; "killed" and "silent", which the fleet caused; "not-needed", as the round was complete; else the
    outcome with its reason, as in "rejected: not-selected".
    """

    client: str
    kind: str
    ending: str
    outcome: Outcome

    @classmethod
    def of(cls, ended: Ended, kind: Kind, failure: PlannedFailure, state: Path) -> Session:
        """The session of a process that ended. If it died, this is "failed: process-died", unless the fleet killed it.

        state: the device's state folder, as a report may count although the process died before it sent the device's
        id.
        """
        died = Outcome(reason="process-died", detail=f"exit code {ended.exit_code}", retryable="transient")
        outcome = ended.outcome or replace(died, arch=kind.arch, backend=kind.backend, device=device_in(state))
        return cls(ended.client, kind.name, _ending(ended, outcome, failure), outcome)

    @property
    def planned(self) -> bool:
        """Whether it ended as planned, so that it says nothing about the device or the coordinator."""
        return self.ending in {"killed", "silent"}


def device_in(state: Path) -> str:
    """The id of the device with a state folder; empty if it has no key yet."""
    if not (state / "device-key").exists():
        return ""
    return device_id(PublicKey.of(device_key(state, Sealer(KeyFile(state / "sealing-key")))).text)


def _ending(ended: Ended, outcome: Outcome, failure: PlannedFailure) -> str:
    if failure.kills and ended.exit_code == -signal.SIGKILL:
        return "killed"
    # Nothing of this left the device: that the network was gone, or before it noticed, that conditions failed.
    if failure.silent and outcome.task and outcome.reason in {"unreachable", "conditions"}:
        return "silent"
    if outcome.outcome in {"reported", "not-needed"}:
        return outcome.outcome
    return f"{outcome.outcome}: {outcome.reason}"


@dataclass(slots=True)
class FleetSummary:
    """Sums over the sessions of a fleet.

    devices: their number by kind. sessions: their number by client. endings: sessions by ending, and `by_kind` the same
    for every kind. clients: the client behind each device id. participants: the clients that ever reported. phases:
    seconds of wall time of the sessions that reported (device_runtime/errors.py).
    """

    devices: Counter[str]
    sessions: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    clients: dict[str, str] = field(default_factory=dict)
    participants: set[str] = field(default_factory=set)
    phases: dict[Phase, float] = field(default_factory=dict)

    def add(self, session: Session) -> None:
        """Count one session."""
        outcome = session.outcome
        self.sessions[session.client] += 1
        self.endings[session.ending] += 1
        self.by_kind.setdefault(session.kind, Counter())[session.ending] += 1
        self.bytes_up += outcome.bytes_up
        self.bytes_down += outcome.bytes_down
        if outcome.device:
            self.clients[outcome.device] = session.client
        if outcome.outcome == "reported":
            self.participants.add(session.client)
            for phase, seconds in outcome.phases.items():
                self.phases[phase] = self.phases.get(phase, 0.0) + seconds


# This many failed sessions before the first good one, or this long without one later, mean that there is no
# coordinator.
MAX_FAILURES = 20
NO_SUCCESS_S = 60.0
REMEDIES = {
    "unreachable": "; start the coordinator at {}, or name its port for devices",
    "not-attested": "; give the devices its enrolment secret, or start a coordinator that takes any device, "
    "with --accept-unattested or --trial",
    "unknown-population": "; create a task of this population first (`muster task create --population`), or one of "
    "`muster task list`",
}
"""What an operator can do, by the reason why devices fail; with the coordinator's URL."""
# This long without a report, while sessions end, means that there will be none: devices may never work, or all die.
NO_REPORT_S = 3600.0
# The delay after which a device that failed, or may not work now, returns. A phone would wait for minutes, which is too
# long for a person watching a fleet.
RETRY_SOON = RetryWindow(0.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The devices of a fleet, and their coordinator. At most `concurrency` devices are awake at a time.

    kinds: the kinds of devices, in shares by weight. seed: of everything that is drawn. wait_s: the time that a device
    waits to be selected. sessions: the number of sessions after which the fleet ends. policy: of every device; None
    means the default one. enrolment_secret: the file of the secret that devices prove to know when they enrol.
    """

    coordinator: str
    population: str
    folder: Path
    concurrency: int = 20
    sessions: int | None = None
    wait_s: float = 30.0
    seed: int = 0
    policy: Policy | None = None
    enrolment_secret: Path | None = None
    kinds: tuple[Kind, ...] = equal_kinds((HERE,), ("onnxruntime",))


@dataclass(slots=True)
class _Device:
    """One device: its kind and faults, the number of its sessions, the last failure, and its next time to wake."""

    client: str
    kind: Kind
    emulated: EmulatedDevice
    sessions: int = 0
    failure: PlannedFailure = field(default_factory=PlannedFailure)
    awake: bool = False
    wakes_at: float = 0.0
    refused: bool = False


class Fleet:
    """Devices of a population on disk, woken at random as a coordinator needs them."""

    def __init__(self, config: FleetConfig, population: Population) -> None:
        if config.concurrency < 1:
            raise FleetError(f"at least one device must be awake, not {config.concurrency}")
        address_of(config.coordinator)
        _check("backend", [kind.backend for kind in config.kinds], tuple(BACKENDS))
        _check("architecture", [kind.arch for kind in config.kinds], architectures())
        self._config = config
        self._random = random.Random(config.seed)
        self._devices = {
            client: _Device(client, kind, kind.draw_device(random.Random(f"{config.seed} {client}")))
            for client, kind in zip(population.clients, assign_kinds(config.kinds, len(population)), strict=True)
        }
        in_browsers = sum(device.kind.host == BROWSER for device in self._devices.values())
        if in_browsers > browsers.MOST:
            raise ProfileError(f"at most {browsers.MOST} devices of a fleet are in browsers, not {in_browsers}")
        self._began = time.monotonic()
        self._failures = 0
        self._last_success: float | None = None
        self._last_report = self._began
        self._done = False
        for index, client in enumerate(population.clients):
            folder = config.folder / client
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(folder / "examples.npz", **as_devices_hold(population.shard(index)))  # type: ignore[arg-type]

    def run(
        self, on_session: Callable[[Session], None] = lambda session: None, servers: ForkServers | None = None
    ) -> FleetSummary:
        """Wake devices until the population has no more work, or `sessions` have ended.

        servers: the hosts of devices; new ones if not given. A device process that dies counts as a session. Raises
        FleetError when sessions keep failing, as without a coordinator or with an unknown population; when every device
        is permanently refused; and when the coordinator has no page for devices in browsers. Raises SysrootError when
        devices of an architecture cannot run here.
        """
        if any(device.kind.host == BROWSER for device in self._devices.values()):
            browsers.check_page(self._config.coordinator)
        if servers is not None:
            return self._run(on_session, servers)
        loaded: dict[str, list[str]] = {}
        for host, backend in dict.fromkeys(
            (emulated.kind.host, emulated.kind.backend) for emulated in self._devices.values()
        ):
            loaded.setdefault(host, []).append(backend)
        with fork_servers(loaded) as started:
            return self._run(on_session, started)

    def _run(self, on_session: Callable[[Session], None], servers: ForkServers) -> FleetSummary:
        summary = FleetSummary(Counter(device.kind.name for device in self._devices.values()))
        start_session, ended = servers
        awake, started = 0, 0
        self._began = self._last_report = time.monotonic()
        while True:
            while awake < self._config.concurrency and not self._done and started != self._config.sessions:
                device = self._next()
                if device is None:
                    break
                start_session(device.kind.host, self._start(device))
                awake, started = awake + 1, started + 1
            if awake == 0 and (self._done or started == self._config.sessions):
                return summary
            report = self._wait(ended, full=awake == self._config.concurrency)
            if report is not None:
                awake -= 1
                session = self._end_session(report)
                summary.add(session)
                on_session(session)
                self._check_progress(session)

    def _start(self, device: _Device) -> Start:
        config, folder = self._config, self._config.folder / device.client
        device.awake, device.sessions = True, device.sessions + 1
        labels = tuple(device.emulated.labels)
        device.failure = device.kind.draw_failure(random.Random(f"{config.seed} {device.client} {device.sessions}"))
        return Start(
            client=device.client,
            coordinator=config.coordinator,
            population=config.population,
            examples=str(folder / "examples.npz"),
            state=str(state_folder(config.folder, device.client)),
            wait_s=config.wait_s,
            backend=device.kind.backend,
            began=self._began,
            device=device.emulated,
            failure=device.failure,
            policy=replace(config.policy or Policy(), labels=labels) if labels else config.policy,
            enrolment_secret=None if config.enrolment_secret is None else str(config.enrolment_secret.absolute()),
        )

    def _next(self) -> _Device | None:
        """A device that may wake, drawn at random, or None when all still sleep."""
        now = time.monotonic()
        ready = [device for device in self._devices.values() if not device.awake and device.wakes_at <= now]
        return self._random.choice(ready) if ready else None

    def _wait(self, ended: EndedSessions, *, full: bool) -> Ended | None:
        """The next ended session, or None when a sleeping device may wake first."""
        now = time.monotonic()
        sleepers = () if full else (device.wakes_at for device in self._devices.values() if not device.awake)
        until = min(sleepers, default=now + 1)
        try:
            report = ended.get(timeout=max(0.01, min(until - now, 1.0)))
        except queue.Empty:
            return None
        if report is None:
            raise FleetError(DIED)
        return report

    def _end_session(self, report: Ended) -> Session:
        """Put the device to sleep for its retry window, and note when there is no more work."""
        device = self._devices[report.client]
        session = Session.of(report, device.kind, device.failure, state_folder(self._config.folder, device.client))
        window = _retry_window(session.outcome)
        device.awake = False
        device.wakes_at = time.monotonic() + self._random.uniform(window.min_s, window.max_s)
        # An emulated device gets no new examples, so too few stay too few.
        device.refused = session.outcome.retryable == "permanent" or session.outcome.reason == "not-eligible"
        self._done = self._done or session.outcome.reason == "no-task"
        return session

    def _check_progress(self, session: Session) -> None:
        """Raise FleetError when there is no coordinator, it refuses all of these devices, or no report ever comes."""
        now = time.monotonic()
        last = f"the last: {session.ending}: {session.outcome.detail}"
        if session.outcome.outcome == "reported":
            self._last_report = now
        elif now - self._last_report > NO_REPORT_S and not self._done:
            raise FleetError(f"no device reported for {NO_REPORT_S / 60:g} minutes; {last}")
        if session.planned or self._done:
            return
        remedy = REMEDIES.get(session.outcome.reason or "", "").format(self._config.coordinator)
        if all(device.refused for device in self._devices.values()):
            raise FleetError(f"every device is refused for good, all {len(self._devices)}; {last}{remedy}")
        if session.outcome.outcome != "failed":
            self._failures, self._last_success = 0, now
            return
        self._failures += 1
        stuck = self._failures >= min(MAX_FAILURES, len(self._devices))
        if self._last_success is not None:
            stuck = stuck and now - self._last_success > NO_SUCCESS_S
        if stuck:
            raise FleetError(f"{self._failures} sessions in a row failed; {last}{remedy}")


def state_folder(folder: Path, client: str) -> Path:
    """The state folder of a client's device, in a fleet's folder."""
    return folder / client / "state"


def _check(what: str, names: list[str], choices: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in choices]
    if unknown or not names:
        raise ProfileError(
            f"no {what} is called {', '.join(map(repr, unknown))}; {offered(', '.join(unknown), choices)}"
        )


def _retry_window(outcome: Outcome) -> RetryWindow:
    if outcome.retry is not None:
        return outcome.retry
    if outcome.outcome in {"reported", "not-needed"}:
        return RetryWindow(0.0, 0.0)
    passes = outcome.retryable == "transient" or outcome.reason == "conditions"
    return RETRY_SOON if passes else default_window(outcome)
