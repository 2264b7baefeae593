"""The security of devices: which assumptions of the threat model their policy makes hold."""

from __future__ import annotations

from coordinator.rules.assumption import Assumption
from device_runtime.permission.policy import Policy
from device_runtime.sandbox.confinement import lacking
from secagg.parameters import LEAST_COHORT


def of_device(policy: Policy) -> tuple[Assumption, ...]:
    """The assumptions on devices with this policy, as far as they are like this machine: defences of their own."""
    return (
        _set("releases are signed", bool(policy.signers), "signers", "public keys that release plans"),
        _set("the authority is pinned", policy.authority is not None, "authority", "the authority's public key"),
        _set("no report leaves in the clear", policy.require_secure_aggregation, "require_secure_aggregation", "true"),
        _set("cohorts hide a device", policy.min_cohort >= LEAST_COHORT, "min_cohort", f"{LEAST_COHORT} or more"),
        _set("releases are in a log", policy.require_release_log, "require_release_log", "true"),
        _set("requests are encrypted", policy.require_https, "require_https", "true"),
        _set("programs have a signer", not policy.unsigned_programs, "unsigned_programs", "false"),
        _sandbox(),
    )


def _sandbox() -> Assumption:
    lacks = ", ".join(lacking())
    return Assumption(
        name="sandboxes are closed",
        holds=not lacks,
        found=f"a device on this machine lacks {lacks}" if lacks else "a device on this machine has all defences",
        remedy="run devices on Linux 6.12 or newer, on x86-64 or 64-bit ARM, with Landlock and seccomp allowed",
    )


def _set(name: str, holds: bool, key: str, value: str) -> Assumption:
    state = f"the policy's {key} is set" if holds else f"the policy's {key} does not say so"
    return Assumption(name=name, holds=holds, found=state, remedy=f"{key}: {value}, in the device's policy.toml")
