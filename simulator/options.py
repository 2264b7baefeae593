"""Options of a simulation as plain values, such as a TOML file or a caller in Python has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from fedcore.names import offered
from fedcore.validation import field_converter
from simulator.configuration import SimulationConfig, plain

_KINDS = get_type_hints(SimulationConfig)
_convert = field_converter(SimulationConfig, dec_hook=lambda kind, value: kind(value))


def to_config(values: Mapping[str, Any]) -> SimulationConfig:
    """A configuration from plain values, such as a TOML file has.

    Raises msgspec.ValidationError for an unknown option and for a value of a wrong type.
    """
    return SimulationConfig(**to_options(values))


def to_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Some options of a configuration, from plain values. Raises msgspec.ValidationError as `to_config`."""
    unknown = sorted(set(values) - set(_KINDS))
    if unknown:
        raise msgspec.ValidationError(f"unknown options {unknown}; {offered(unknown[0], _KINDS)}")
    return {name: _convert(name, plain(value)) for name, value in values.items()}
