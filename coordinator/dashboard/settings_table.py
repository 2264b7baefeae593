"""Settings of tasks for people: those of a task and of its parts, their values, and what a form gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import msgspec

from coordinator.rules.task_settings import TaskSettings
from fedcore.validation import Setting, build, settings_of, text_of


class Group(NamedTuple):
    """The settings of a part, such as `secagg.bits`. optional: whether a task, say, may do without the part."""

    name: str
    about: str
    optional: bool
    settings: tuple[Setting, ...]


@cache
def groups(kind: type = TaskSettings) -> tuple[Group, ...]:
    """All settings of a task, or of another class, by part; its own first."""
    everything = settings_of(kind)
    parts = [
        Group(
            part.name, part.about, part.optional, tuple(_within(part.name, inner) for inner in settings_of(part.part))
        )
        for part in everything
        if part.part is not None
    ]
    return Group("", "", False, tuple(setting for setting in everything if setting.part is None)), *parts


def values(settings: TaskSettings) -> dict[str, str]:
    """The values of a task's settings as text, by name, as a form gives them; of a part that it does without, none."""
    flat: dict[str, str] = {}
    for name, value in msgspec.to_builtins(settings).items():
        if isinstance(value, Mapping):
            flat |= {name: "yes"} | {f"{name}.{inner_name}": text_of(inner) for inner_name, inner in value.items()}
        elif value is not None or name not in {group.name for group in groups()}:
            flat[name] = text_of(value)
    return flat


def told_apart(settings: TaskSettings) -> tuple[list[Setting], list[Setting]]:
    """The settings of a task that are not at their defaults, and those that are; none of a part that it does without."""
    given, parts = values(settings), {one.name: one for one in settings_of(TaskSettings)}
    every = [one for group in groups() for one in (*([parts[group.name]] if group.optional else []), *group.settings)]
    told: tuple[list[Setting], list[Setting]] = [], []
    for one in every:
        if one.name in given:
            told[not one.required and given[one.name] == one.shown_default].append(one)
    return told


def from_form(fields: Mapping[str, str]) -> TaskSettings:
    """The settings that a form gives, by name; those left empty have their defaults.

    A part that a task may do without is there when its own name is given. Raises InvalidTask.
    """
    nested: dict[str, Any] = {}
    for group in groups():
        if group.optional and not fields.get(group.name):
            continue
        into = nested.setdefault(group.name, {}) if group.name else nested
        texts = {setting.name.rpartition(".")[2]: fields.get(setting.name, "").strip() for setting in group.settings}
        into |= {name: text for name, text in texts.items() if text}
    return build(TaskSettings, nested, text=True)


def _within(part: str, setting: Setting) -> Setting:
    return replace(setting, name=f"{part}.{setting.name}")
