"""The identity of this device for its coordinator: keys in the state folder, enrolments and credentials."""

from __future__ import annotations

from device_runtime.clock import Clock
from device_runtime.config import DeviceConfig
from device_runtime.errors import PolicyForbids
from device_runtime.permission.policy import Policy
from device_runtime.protocol.credentials import Credentials, DeviceKeys
from device_runtime.protocol.enrolment import Enrolments
from device_runtime.protocol.transport import Transport
from device_runtime.state.database import StateDatabase
from device_runtime.state.identity import device_key, secagg_key
from device_runtime.state.sealing import KeyFile, Sealer


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
