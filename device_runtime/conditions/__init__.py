"""Conditions of a device, requirements on them, and the sources of both."""

from __future__ import annotations

from device_runtime.conditions.linux import linux
from device_runtime.conditions.profiles import constant, flapping, trace
from fedcore.conditions import Conditions, ConditionSource, Requirements

__all__ = ["ConditionSource", "Conditions", "Requirements", "constant", "flapping", "linux", "trace"]
