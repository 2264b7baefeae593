"""Settings of tasks for people: names, meanings, defaults and values, all read from the settings' own types."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from coordinator.errors import InvalidTask
from coordinator.rules.clear_reports import ESTIMATORS
from coordinator.rules.task_settings import TaskSettings
from fedcore.decoding import converter
from fedcore.errors import FedcoreError

_to_settings = converter(TaskSettings, strict=False)
_CHOICES = {"estimator": ESTIMATORS}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, such as `secagg.bits`. default: as text, "" where it may be left out; required: where it may not.

    kind: number, text, list, yes-no or choice, of which `choices` are all.
    """

    name: str
    meaning: str
    default: str
    required: bool
    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """The settings of a part of a task, such as `secagg`. optional: whether the task may do without the part."""

    name: str
    summary: str
    optional: bool
    settings: tuple[Setting, ...]


@cache
def groups() -> tuple[Group, ...]:
    """All settings of a task by part, the task's own first."""
    own, parts = [], []
    meanings = _meanings(TaskSettings)
    for name, hint, default in _fields(TaskSettings):
        part, optional = _part(hint)
        if part is None:
            own.append(_setting(name, hint, default, meanings[name]))
            continue
        of_part = _meanings(part)
        settings = (_setting(f"{name}.{one}", kind, given, of_part[one]) for one, kind, given in _fields(part))
        parts.append(Group(name, meanings[name], optional, tuple(settings)))
    return Group("", "", False, tuple(own)), *parts


def values(settings: TaskSettings) -> dict[str, str]:
    """The values of a task's settings as text, by name; of a part that it does without, none."""
    flat: dict[str, str] = {}
    for name, value in msgspec.to_builtins(settings).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{one}": text_of(inner) for one, inner in value.items()}
        elif value is not None or name not in {group.name for group in groups()}:
            flat[name] = text_of(value)
    return flat


def settings_of(given: Mapping[str, str]) -> TaskSettings:
    """The settings that a form gives, by name; those left empty have their defaults.

    A part that a task may do without is there when its own name is given. Raises InvalidTask.
    """
    nested: dict[str, Any] = {}
    for group in groups():
        if group.optional and not given.get(group.name):
            continue
        into = nested.setdefault(group.name, {}) if group.name else nested
        for one in group.settings:
            text = given.get(one.name, "").strip()
            if text:
                into[one.name.rpartition(".")[2]] = _plain(one, text)
    try:
        return _to_settings(nested)
    except msgspec.ValidationError as error:
        raise InvalidTask(_readable(str(error))) from error
    except (FedcoreError, ValueError) as error:
        raise InvalidTask(str(error)) from error


def text_of(value: object) -> str:
    """A value as a form and a table show it."""
    if value is None or value is MISSING or value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(setting: Setting, text: str) -> object:
    if setting.kind == "list":
        return [part.strip() for part in text.split(",")]
    return {"yes": "true", "no": "false"}.get(text, text) if setting.kind == "yes-no" else text


def _readable(words: str) -> str:
    """msgspec's error with the setting first: "goal: Expected `int`, got `str`"."""
    said, _, where = words.partition(" - at `$.")
    return f"{where.rstrip('`')}: {said}" if where else said


def _setting(name: str, hint: Any, default: object, meaning: str) -> Setting:
    kind, choices = _kind(hint)
    choices = _CHOICES.get(name.rpartition(".")[2], choices)
    required = default is MISSING or default is msgspec.NODEFAULT
    return Setting(name, meaning, text_of(default), required, "choice" if choices else kind, choices)


def _kind(hint: Any) -> tuple[str, tuple[str, ...]]:
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return _kind(next(one for one in get_args(hint) if one is not type(None)))
    if get_origin(hint) is Literal:
        return "choice", tuple(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return "list", ()
    return {bool: "yes-no", int: "number", float: "number"}.get(hint, "text"), ()


def _part(hint: Any) -> tuple[Any, bool]:
    """The type of a part of the settings, if the hint is of one, and whether it may be None."""
    optional = get_origin(hint) in (Union, types.UnionType)
    kinds = [one for one in get_args(hint) if one is not type(None)] if optional else [hint]
    found = next((one for one in kinds if isinstance(one, type) and _has_fields(one)), None)
    return found, optional


def _has_fields(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, msgspec.Struct)


def _fields(kind: Any) -> Iterator[tuple[str, Any, object]]:
    """Name, type and default of each field; a default that is made is left out."""
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        for one in dataclass_fields(kind):
            made = one.default_factory is not MISSING
            yield one.name, hints[one.name], None if made else one.default
    else:
        for field in msgspec.structs.fields(kind):
            yield field.name, hints[field.name], field.default


def _meanings(kind: Any) -> dict[str, str]:
    """What the docstrings of a type and its bases say of fields, as `name: meaning.` or `name, name: meaning.`"""
    meanings = {name: "" for name, _, _ in _fields(kind)}
    one_of = "|".join(map(re.escape, meanings))
    named = re.compile(rf"(?:^|(?<=[.\n] ))((?:{one_of})(?:, (?:{one_of}))*): ")
    for cls in reversed(kind.__mro__):
        for paragraph in inspect.cleandoc(cls.__dict__.get("__doc__") or "").split("\n\n"):
            # Either a field has a line of its own, or several share a paragraph.
            lines = [" ".join(part.split()) for part in re.split(r"\n(?=\w+(?:, \w+)*: )", paragraph)]
            for line in lines:
                _, *parts = named.split(f"{line}")
                for names, words in zip(parts[::2], parts[1::2], strict=True):
                    meanings |= {name: words.strip() for name in names.split(", ")}
    return meanings
