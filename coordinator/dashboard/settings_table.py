"""Settings of tasks for people: those of a task and of its parts, their values, and what a form gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from coordinator.rules.task_settings import TaskSettings
from fedcore.validation import Setting, build, settings_of, text_of


@dataclass(frozen=True, slots=True)
class Group:
    """The settings of a part, such as `secagg.bits`. optional: whether a task may do without the part."""

    name: str
    about: str
    optional: bool
    settings: tuple[Setting, ...]


@cache
def groups(kind: type = TaskSettings) -> tuple[Group, ...]:
    """All settings of a task, or of another class, by part; its own first."""
    everything = settings_of(kind)
    parts = [
        Group(one.name, one.about, one.optional, tuple(_within(one.name, inner) for inner in settings_of(one.part)))
        for one in everything
        if one.part is not None
    ]
    return Group("", "", False, tuple(one for one in everything if one.part is None)), *parts


def values(settings: TaskSettings) -> dict[str, str]:
    """The values of a task's settings as text, by name; of a part that it does without, none."""
    flat: dict[str, str] = {}
    for name, value in msgspec.to_builtins(settings).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{one}": text_of(inner) for one, inner in value.items()}
        elif value is not None or name not in {group.name for group in groups()}:
            flat[name] = text_of(value)
    return flat


def from_form(given: Mapping[str, str]) -> TaskSettings:
    """The settings that a form gives, by name; those left empty have their defaults.

    A part that a task may do without is there when its own name is given. Raises InvalidTask.
    """
    nested: dict[str, Any] = {}
    for group in groups():
        if group.optional and not given.get(group.name):
            continue
        into = nested.setdefault(group.name, {}) if group.name else nested
        texts = {one.name.rpartition(".")[2]: given.get(one.name, "").strip() for one in group.settings}
        into |= {name: text for name, text in texts.items() if text}
    return build(TaskSettings, nested, text=True)


def _within(part: str, one: Setting) -> Setting:
    return replace(one, name=f"{part}.{one.name}")
