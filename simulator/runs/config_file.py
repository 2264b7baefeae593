"""The configuration of a run as a TOML file, as `muster simulate` reads it too."""

from __future__ import annotations

from typing import Any

import msgspec

from simulator.configuration import SimulationConfig

WHO_TRAINS = {"processes", "ray"}


def to_toml(config: SimulationConfig) -> str:
    """A configuration as TOML text: what is not None, then a table for each of `settings` and `schedule`."""
    plain = plain_of(config)
    tables = {name: value for name, value in plain.items() if isinstance(value, dict)}
    parts = [_lines({name: value for name, value in plain.items() if name not in tables})]
    parts += [f"\n[{name}]\n{_lines(table)}" for name, table in tables.items()]
    return "".join(parts)


def plain_of(config: SimulationConfig) -> dict[str, Any]:
    """A configuration as plain values, without those that are None."""
    plain: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    return {name: value for name, value in plain.items() if value is not None}


def differences(config: SimulationConfig, other: SimulationConfig) -> list[str]:
    """Every key in which two configurations differ, with both values; WHO_TRAINS, which changes no result, apart."""
    ours, theirs = flat_of(config), flat_of(other)
    keys = [
        key for key in dict.fromkeys([*ours, *theirs]) if key not in WHO_TRAINS and ours.get(key) != theirs.get(key)
    ]
    return [f"{key} ({_words(ours.get(key))} and {_words(theirs.get(key))})" for key in keys]


def flat_of(config: SimulationConfig) -> dict[str, Any]:
    """A configuration as plain values by dotted names, such as `settings.client_lr`."""
    flat: dict[str, Any] = {}
    for name, value in plain_of(config).items():
        flat |= {f"{name}.{key}": option for key, option in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _words(value: object) -> str:
    return "not given" if value is None else str(value)


def _lines(values: dict[str, Any]) -> str:
    # Text, numbers, truths and lists are written in TOML as in JSON, but for one character.
    written = {name: msgspec.json.encode(value).decode().replace("\x7f", "\\u007f") for name, value in values.items()}
    return "".join(f"{name} = {text}\n" for name, text in written.items())
