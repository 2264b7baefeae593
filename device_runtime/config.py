"""The configuration of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from device_runtime.conditions import Conditions, ConditionSource, Requirements
from device_runtime.permission.policy import Policy
from device_runtime.protocol.transport import Transport
from device_runtime.sandbox.process import Sandbox
from device_runtime.state.sealing import KeyStore
from device_runtime.trainer import Trainer
from fedcore.wire.messages import Attestation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """One device. `state` is a folder of its own; `wait_s` is how long it waits to be selected.

    policy: what it may do; None is the `policy.toml` of the state folder. enrolment_secret: what it proves to know when
    it enrols; None proves nothing. attest: what gives the platform's attestation in the place of that, for a challenge
    of 32 bytes, or raises KeyUnavailable. keystore: where the key is that seals what it keeps; None is files beside
    that.

    conditions: read before a session, while it downloads and while it trains, and held against `requirements`. Without
    a source nothing is known, so no requirement holds. stopping: whether to give up at once.

    connect, trainer: what makes the way to the coordinator, from its URL, and the trainer, from the backend's name.
    """

    coordinator: str
    population: str
    examples: Path
    state: Path
    backend: str = "onnxruntime"
    wait_s: float = 30.0
    policy: Policy | None = None
    enrolment_secret: bytes | None = field(default=None, repr=False)
    attest: Callable[[bytes], Attestation] | None = None
    keystore: KeyStore | None = None
    conditions: ConditionSource = Conditions
    requirements: Requirements = field(default_factory=Requirements)
    stopping: Callable[[], bool] = lambda: False
    connect: Callable[[str], Transport] = Transport.to
    trainer: Callable[[str], Trainer] = Sandbox

    def unmet(self, now: Conditions) -> tuple[str, ...]:
        """The reasons not to work under the conditions of now, in words; empty when there are none."""
        if self.stopping():
            return ("the application is stopping",)
        return self.requirements.unmet(now)
