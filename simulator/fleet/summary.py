"""Ends of a fleet's sessions, and the sums over a fleet."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from device_runtime.outcome import Outcome, Phase
from device_runtime.state.folder import KeyFile, Sealer, device_key
from fedcore.wire.signatures import PublicKey, device_id
from simulator.fleet.faults import PlannedFailure
from simulator.fleet.fork_server import Ended
from simulator.fleet.profile import Kind


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
    seconds of wall time of the sessions that reported (device_runtime/outcome.py).
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
