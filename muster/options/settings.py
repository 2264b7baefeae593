"""Options made of described settings: one for each setting, and for a part one of KEY=VALUE, or one for each in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from fedcore.validation import Setting, settings_of
from muster.options.fields import Command, with_parameters
from muster.options.key_values import parse_key_values
from muster.options.names import option_of

_METAVARS = {
    "whole number": "<int>",
    "number": "<float>",
    "list": "<names>",
    "path": "<path>",
    "mapping": "KEY=VALUE",
    "part": "KEY=VALUE",
}


def with_settings(
    kind: type, spread: Collection[str] = (), only: Collection[str] = (), defaults: Mapping[str, Any] = {}
) -> Callable[[Command], Command]:
    """Have a command take the settings of a class as options; its parameter `settings` gets those given, as a mapping.

    spread: the parts of which each setting is an option. One that may be left out has a switch of its name. only: the
    settings of the class that the command takes, by default all. defaults: where the command has others; None where it
    can do without.
    """
    chosen = [
        replace(setting, default=defaults.get(setting.name, setting.default))
        for setting in settings_of(kind)
        if not only or setting.name in only
    ]
    options = list(_options(chosen, spread))
    return with_parameters("settings", (option.parameter for option in options), lambda given: _mapping(options, given))


@dataclass(frozen=True, slots=True)
class _Option:
    """The option of a setting. part: the one that it is spread from. switch: whether it says that a part is there."""

    setting: Setting
    part: Setting | None = None
    switch: bool = False

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of a command that is this option."""
        setting = self.setting
        flag = self.switch or setting.kind == "flag"
        kind: Any = bool if flag else list[str] if setting.kind in ("list", "mapping", "part") else str
        metavar = None if flag else _METAVARS.get(setting.kind, "<str>")
        option = typer.Option(option_of(setting.name), metavar=metavar, help=self._help())
        default = inspect.Parameter.empty if setting.required else False if flag else None
        hint = kind if setting.required or flag else kind | None
        return inspect.Parameter(
            setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
        )

    def _help(self) -> str:
        setting, about = self.setting, self.setting.about
        if self.part is not None:
            about = f"{self.part.name}: {about[0].lower()}{about[1:]}"
        if self.switch or setting.kind == "flag":
            return about
        if setting.part is not None:
            inside = settings_of(setting.part)
            keys = ", ".join(f"{inner.name} ({inner.facts})" if inner.facts else inner.name for inner in inside)
            return f"{about} Keys: {keys}."
        return f"{about}  [{setting.facts}]" if setting.facts else about


def _options(settings: Iterable[Setting], spread: Collection[str]) -> Iterator[_Option]:
    for setting in settings:
        if setting.part is None or setting.name not in spread:
            yield _Option(setting)
            continue
        if setting.optional:
            yield _Option(setting, switch=True)
        yield from (_Option(inner, part=setting) for inner in settings_of(setting.part))


def _mapping(options: list[_Option], given: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given, as text, with a mapping for each part."""
    chosen: dict[str, Any] = {}
    for option in options:
        setting, part, value = option.setting, option.part, given[option.setting.name]
        if not value and value != "":
            continue
        if part is not None:
            if part.optional and part.name not in chosen:
                words = f"it is a setting of {part.name}: add {option_of(part.name)}"
                raise typer.BadParameter(words, param_hint=option_of(setting.name))
            chosen.setdefault(part.name, {})[setting.name] = value
        elif setting.kind in ("mapping", "part"):
            chosen[setting.name] = {} if option.switch else parse_key_values(value, option_of(setting.name))
        else:
            chosen[setting.name] = ",".join(value) if isinstance(value, list) else value
    return chosen
