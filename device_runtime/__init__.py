"""The device runtime: a session loop that downloads graphs, runs them over local examples and uploads one vector.

It contains no algorithm and no tensor library: a new algorithm reaches a device as data, never as an update of the app.
A host application needs only the names below (docs/device.md). Each is loaded on first use, so that a part of this
package works without the dependencies of the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from device_runtime.device import Device
    from device_runtime.errors import ConfigError, DeviceError, ModelRefused, NoModel, Outcome
    from device_runtime.examples import Collection, ExampleStore, Retention
    from device_runtime.models.model import Model, Personalised
    from device_runtime.permission.policy import PerDay, PlanLimits, Policy, Questions
    from device_runtime.state.folder import KeyStore

__all__ = [
    "Collection",
    "ConfigError",
    "Device",
    "DeviceError",
    "ExampleStore",
    "KeyStore",
    "Model",
    "ModelRefused",
    "NoModel",
    "Outcome",
    "PerDay",
    "Personalised",
    "PlanLimits",
    "Policy",
    "Questions",
    "Retention",
]

_HOMES = {
    "ConfigError": "errors",
    "Device": "device",
    "DeviceError": "errors",
    "Model": "models.model",
    "ModelRefused": "errors",
    "NoModel": "errors",
    "Collection": "examples",
    "ExampleStore": "examples",
    "KeyStore": "state.folder",
    "Retention": "examples",
    "Outcome": "errors",
    "PerDay": "permission.policy",
    "Personalised": "models.model",
    "PlanLimits": "permission.policy",
    "Policy": "permission.policy",
    "Questions": "permission.policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
