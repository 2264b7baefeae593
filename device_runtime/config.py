"""The configuration of one device, and its identity for its coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from device_runtime.conditions import Clock, Conditions, ConditionSource, Requirements
from device_runtime.errors import ConfigError, PolicyForbids
from device_runtime.permission.policy import Policy
from device_runtime.protocol.enrolment import Credentials, DeviceKeys, Enrolments
from device_runtime.protocol.transport import Transport
from device_runtime.sandbox.process import Sandbox
from device_runtime.state.database import StateDatabase
from device_runtime.state.folder import KeyFile, KeyStore, Sealer, device_key, secagg_key
from device_runtime.trainer import Trainer
from fedcore.errors import why
from fedcore.wire.messages import Attestation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """One device. `state` is its own folder; `wait_s` is the time that it waits to be selected.

    policy: what it may do; None means the `policy.toml` of the state folder. enrolment_secret: the secret that it
    proves to know when it enrols; None proves nothing. attest: instead of a secret, a function that returns the
    platform's attestation for a challenge of 32 bytes, or raises KeyUnavailable. keystore: holds the key that seals
    stored data; None means files beside that data.

    conditions: read before a session, while it downloads and while it trains, and compared with `requirements`. Without
    a source nothing is known, so no requirement holds. stopping: whether to give up at once. labels: what the app says
    of the device, of which it tells those that its policy lists.

    connect, trainer: functions that make the transport, from the coordinator's URL, and the trainer, from the backend's
    name.
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
    labels: Mapping[str, str] = field(default_factory=dict)
    connect: Callable[[str], Transport] = Transport.to
    trainer: Callable[[str], Trainer] = Sandbox

    def unmet(self, now: Conditions) -> tuple[str, ...]:
        """The reasons, in words, not to work under the current conditions; empty when there are none."""
        if self.stopping():
            return ("the application is stopping",)
        return self.requirements.unmet(now)


def secret_in(secret: bytes | Path | str | None) -> bytes | None:
    """An enrolment secret, as it is or from its file. Raises ConfigError where that cannot be read, or is empty."""
    if secret is None or isinstance(secret, bytes):
        return secret
    try:
        held = Path(secret).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the enrolment secret {secret} cannot be read: {why(error)}") from error
    if not held:
        raise ConfigError(f"the enrolment secret {secret} is empty")
    return held


def sealer_of(config: DeviceConfig) -> Sealer:
    """What seals the device's stored data: with the key of its keystore, or of a file in its state folder."""
    return Sealer(config.keystore or KeyFile(config.state / "sealing-key"))


def enrolments(
    config: DeviceConfig, policy: Policy, database: StateDatabase, sealer: Sealer, clock: Clock
) -> Enrolments:
    """The device's enrolment at its coordinator: the identity for a transport. Raises StateError or KeyUnavailable."""

    def to_authority(url: str) -> Transport:
        if policy.require_https and not url.lower().startswith("https://"):
            raise PolicyForbids("against require_https of this device's policy", f"the authority is at {url}")
        return config.connect(url)

    place = config.state, sealer
    keys = DeviceKeys(device_key(*place), secagg_key(*place), config.enrolment_secret, config.attest)
    credentials = Credentials(database, keys, to_authority, clock.wall)
    return Enrolments(database, config.coordinator, keys, credentials, policy.named_authority)
