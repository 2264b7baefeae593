"""Settings of tasks for people: those of a task and of its parts, their values, and what a form gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import msgspec

from coordinator.errors import InvalidTask
from coordinator.rules.task_settings import TaskSettings
from fedcore.validation import Setting, build, build_one, complaints, settings_of, text_of

_OF_DEVICES = {"min_examples", "min_separation_s", "min_separation_rounds", "hold_out_devices", "on_held_out"}


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
    # A task is stored with its goal where it was given no minimum.
    return flat | {"minimum": "" if settings.minimum in (None, settings.goal) else flat["minimum"]}


def told_apart(settings: TaskSettings) -> tuple[list[Setting], list[Setting]]:
    """The settings of a task that are not at their defaults, and those that are; no part that it does without."""
    given, parts = values(settings), {one.name: one for one in settings_of(TaskSettings)}
    told: tuple[list[Setting], list[Setting]] = [], []
    for group in groups():
        for one in (*([parts[group.name]] if group.optional else []), *group.settings):
            if one.name in given:
                told[not one.required and given[one.name] == one.shown_default].append(one)
    return told


def folds() -> tuple[Group, ...]:
    """All settings but those that every task must have, under headings: rounds, devices, and the parts."""
    own, *parts = groups()
    others = [one for one in own.settings if not one.required]
    return (
        Group("rounds", "How a round ends, and what follows it.", False, _those(others, of_devices=False)),
        Group("devices", "Which devices a round may draw.", False, _those(others, of_devices=True)),
        *parts,
    )


def from_form(fields: Mapping[str, str]) -> tuple[TaskSettings | None, dict[str, str]]:
    """The settings that a form gives, by name, or else what is wrong, by field (`field_of`).

    Those left empty have their defaults. A part that a task may do without is there when its own name is given.
    """
    nested: dict[str, Any] = {}
    for group in groups():
        if group.optional and not fields.get(group.name):
            continue
        into = nested.setdefault(group.name, {}) if group.name else nested
        texts = {setting.name.rpartition(".")[2]: fields.get(setting.name, "").strip() for setting in group.settings}
        into |= {name: text for name, text in texts.items() if text}
    if wrong := complaints(TaskSettings, nested, text=True):
        return None, wrong
    sentences = [*_misfits_within_parts(nested)]
    try:
        if not sentences:
            return build(TaskSettings, nested, text=True), {}
    except InvalidTask as error:
        sentences += error.sentences
    told: dict[str, str] = {}
    for sentence in sentences:
        told.setdefault(field_of(sentence), sentence)
    return None, told


def _misfits_within_parts(nested: Mapping[str, Any]) -> Iterator[str]:
    """What settings of one part, such as `clear`, have against each other: a sentence for each part."""
    for name, given in nested.items():
        try:
            build_one(TaskSettings, name, given, text=True)
        except InvalidTask as error:
            yield from error.sentences


def field_of(sentence: str) -> str:
    """The name of the setting that an error begins with, such as `secagg.bits`; "" where it begins with none."""
    found = re.match(r"(?:(\w+): )?(\w+)", sentence)
    if found is None:
        return ""
    names = [one.name for group in groups() for one in group.settings] + [
        one.name for one in groups()[1:] if one.optional
    ]
    exact = ".".join(filter(None, found.groups()))
    return exact if exact in names else next((name for name in names if name.endswith(f".{found[2]}")), "")


def _those(settings: Iterable[Setting], *, of_devices: bool) -> tuple[Setting, ...]:
    return tuple(one for one in settings if (one.name in _OF_DEVICES) is of_devices)


def _within(part: str, setting: Setting) -> Setting:
    return replace(setting, name=f"{part}.{setting.name}")
