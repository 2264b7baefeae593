"""What a device is doing now, what must hold for it to train, and where both come from."""

from __future__ import annotations

from device_runtime.conditions.conditions import Conditions, ConditionSource, Requirements
from device_runtime.conditions.linux import linux
from device_runtime.conditions.profiles import constant, flapping, trace

__all__ = ["ConditionSource", "Conditions", "Requirements", "constant", "flapping", "linux", "trace"]
