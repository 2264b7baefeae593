"""Options of commands as values: names, described settings as options, and those of simulations and tasks."""

from __future__ import annotations

import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from coordinator.rules.task_settings import TaskSettings
from fedcore.validation import Setting, build_one, settings_of
from simulator.configuration import (
    DATA,
    DROP_MISSING,
    INPUT_COLUMNS,
    TARGET_COLUMN,
    USER,
    USER_COLUMN,
    Columns,
    SimulationConfig,
    check_names,
    to_config,
)
from simulator.errors import EngineError

# The two names of a setting: its keyword in Python and in files, and its option in a command. Errors name options.


_OPTIONS = {"settings": "--set", "server_keys": "--server-key", "labels": "--label"}
"""Options that have another name than their setting."""
_KEYWORDS = {option: name for name, option in _OPTIONS.items()} | {
    "--dataset": "users",
    "--format": "formats",
    "--set": "settings",
}
# A command between backquotes stays one. A value ends before the punctuation after it.
_PART = re.compile(r"`[^`]*`|(?<![\w-])(--[a-z][a-z-]*)(?:=('[^']*'|[^\s,;()]*[^\s,;:().]))?")


def option_of(name: str) -> str:
    """The option of a setting."""
    return _OPTIONS.get(name, f"--{name.replace('_', '-')}")


def in_python(message: str) -> str:
    """A message with keywords for the options in it: `--at-once=1` is `at_once=1`, and `--resume` a call."""
    return _PART.sub(_keyword, message)


def _keyword(part: re.Match[str]) -> str:
    option, value = part.groups()
    if option is None:
        return part[0]
    if value is not None and not re.fullmatch(r"'.*'|[A-Z]+|[\d.]+", value):
        value = repr(value)
    if option == "--resume":
        return f"simulator.resume_run({value or ''})"
    return f"{_KEYWORDS.get(option) or option[2:].replace('-', '_')}={value or ''}"


# Options made of described settings, and settings that were typed as options.


Command = Callable[..., None]


def parameters_of(options: type) -> Iterator[inspect.Parameter]:
    """One keyword parameter for each field that has a `typer.Option`."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        hint = hints[field.name]
        if get_origin(hint) is Annotated and isinstance(get_args(hint)[1], OptionInfo):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def with_parameters(
    place: str, parameters: Iterable[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Command], Command]:
    """Have a command of keyword parameters take others as options of its own.

    The command gets what is made of them as its parameter `place`, where they stand in its help.
    """
    taken = {one.name: one for one in parameters}

    def decorate(act: Command) -> Command:
        """Give the command its options."""
        hints = get_type_hints(act, include_extras=True)
        shown: list[inspect.Parameter] = []
        for name, own in inspect.signature(act).parameters.items():
            shown += taken.values() if name == place else [own.replace(annotation=hints[name])]

        @functools.wraps(act)
        def command(**given: Any) -> None:
            act(**{place: make({name: given.pop(name) for name in taken})}, **given)

        command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in shown}
        return command

    return decorate


def parse_key_values(texts: Sequence[str] | None, option: str = "--set") -> dict[str, object]:
    """The parts as a mapping; True is the value of a key alone. Raises typer.BadParameter on what has no key."""
    values: dict[str, object] = {}
    for part in (part.strip() for text in texts or () for part in text.split(",")):
        key, equals, value = part.partition("=")
        if not key:
            raise typer.BadParameter(f"{part!r} is not of the form key=value", param_hint=option)
        if not equals and key.isdigit() and values:  # 0,3
            *_, (name, before) = values.items()
            words = f"a comma begins the next setting; a fraction has a point: {name}={before}.{key}"
            raise typer.BadParameter(words, param_hint=option)
        values[key] = value if equals else True
    return values


class CommandWithSet(TyperCommand):
    """A command with the options --set and --algorithm."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises InvalidSetting for an option, or a bare KEY=VALUE, that is a setting, or for the reverse."""
        from fedcore.algorithms import setting_meant
        from fedcore.errors import InvalidSetting

        algorithm = _value_of("--algorithm", args) or "fedavg"
        for given in _values_of("--set", args):
            name, _, value = given.partition("=")
            option = f"--{name.replace('_', '-')}"
            if any(option in param.opts for param in self.params) and setting_meant(name, algorithm) is None:
                raise InvalidSetting(f"{name} is no setting of {algorithm} but an option: {option} {value}".rstrip())
        for word, value in self._strange(args):
            found = setting_meant(word.lstrip("-").replace("-", "_"), algorithm)
            if found is not None:
                given = f"{found[0]}={value or 'VALUE'}"
                raise InvalidSetting(f"no option {word}: {found[0]} is a setting of {found[1]}: --set {given}")
        return super().parse_args(ctx, args)

    def _strange(self, args: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Words that are no option here, nor the value of one: each with the value that seems to be meant."""
        known = {name: param for param in self.params for name in (*param.opts, *param.secondary_opts)}
        for before, word, after in zip(["", *args], args, [*args[1:], ""], strict=False):
            taken = before in known and not getattr(known[before], "is_flag", False)
            name, equals, value = word.partition("=")
            if name in known or taken or not (equals or name.startswith("--")):
                continue
            yield name, value if equals else "" if after.startswith("--") else after


def _value_of(option: str, args: Sequence[str]) -> str:
    """What an option is given first; empty without it."""
    return next(iter(_values_of(option, args)), "")


def _values_of(option: str, args: Sequence[str]) -> list[str]:
    """What an option is given, each time that it is there."""
    joined = [word.partition("=")[2] for word in args if word.startswith(f"{option}=")]
    return joined + [value for name, value in pairwise(args) if name == option]


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


# Options of `muster simulate`: the settings of a simulation, which files have by the same names.


Data = Annotated[Path | None, typer.Option(help=DATA)]
"""The option of a command that reads data sets."""
UserColumn = Annotated[str, typer.Option("--user", metavar="COLUMN", help=USER_COLUMN)]
InputColumns = Annotated[str, typer.Option("--inputs", metavar="COLUMNS", help=INPUT_COLUMNS)]
TargetColumn = Annotated[str, typer.Option("--target", metavar="COLUMN", help=TARGET_COLUMN)]
DropMissing = Annotated[bool, typer.Option("--drop-missing", help=DROP_MISSING)]


def columns_of(user: str, inputs: str, target: str, *, drop_missing: bool) -> Columns:
    """What the columns of a table mean, by the options of a command. Raises DatasetError."""
    named = tuple(name.strip() for name in inputs.split(",")) if inputs else ()
    return Columns(user=user or USER, inputs=named, target=target, drop_missing=drop_missing)


with_simulation_settings = with_settings(SimulationConfig, spread=("secagg",), defaults={"model": None})
"""Have a command take the settings of a simulation as options; its parameter `settings` gets those given."""


def configuration(files: Sequence[Path], settings: Mapping[str, Any]) -> SimulationConfig:
    """The configuration of files, later ones before earlier ones, overridden by the options that were given.

    A wrong algorithm is reported before torch is loaded. A baseline may have other settings, which are looked at later.
    """
    from fedcore.algorithms import create, module_of

    values: dict[str, Any] = {}
    for path in files:
        values |= _read(path)
    chosen = {name: build_one(SimulationConfig, name, value, text=True) for name, value in settings.items()}
    if "settings" in chosen:
        chosen["settings"] = {**values.get("settings", {}), **chosen["settings"]}
    values |= chosen
    if "plan" not in values and "baseline" not in values:
        algorithm = str(values.get("algorithm", "fedavg"))
        create(algorithm, values.get("settings"), [module_of(algorithm)])
    if "plan" in values:
        values = _completed(values)
    if "model" not in values and not values.get("inputs"):
        words = (
            "name a model, as --model mlp, or a plan with --plan; or the columns of a table, with --inputs and --target"
        )
        raise typer.BadParameter(words, param_hint="--model")
    return to_config(values)


def values_of(path: Path) -> dict[str, Any]:
    """The values of a file of options, as TOML has them. Raises BadParameter."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        from fedcore.errors import why

        raise typer.BadParameter(f"cannot read {path}: {why(error)}", param_hint="CONFIG.toml") from error


def _read(path: Path) -> dict[str, Any]:
    values = values_of(path)
    try:
        check_names(values)
        return {name: build_one(SimulationConfig, name, value) for name, value in values.items()}
    except EngineError as error:
        raise typer.BadParameter(str(error), param_hint=str(path)) from error


def _completed(values: Mapping[str, Any]) -> dict[str, Any]:
    from muster.output import loading

    with loading():
        from simulator.planned import completed_by_plan

    return completed_by_plan(values)


# Options of `muster task create` and `release`: a task's settings, and its release.


_FILE = "With --secagg: its signed release."
ReleaseFile = Annotated[Path | None, typer.Option("--release", metavar="FILE", help=_FILE)]
ReleaseKey = Annotated[
    Path | None,
    typer.Option(metavar="KEYFILE", help="With --secagg: the key of its release."),
]
ReleaseCounter = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --secagg: devices refuse one below the last of the key.",
    ),
]
ReleaseDays = Annotated[int, typer.Option(min=1, max=3650, help="With --secagg: days that the release is good for.")]

_EVALUATED, _COMPARED = "Evaluate TASK, TASK@ROUND or a file.", "With a bundle of compare: the other model."
EvaluatedModel = Annotated[str | None, typer.Option("--evaluate", metavar="MODEL", help=_EVALUATED)]
ComparedModel = Annotated[str | None, typer.Option("--against", metavar="MODEL", help=_COMPARED)]
_EVERY = "Evaluate on held-out devices every N rounds."
EvaluateEvery = Annotated[int | None, typer.Option(metavar="N", help=_EVERY)]
EvaluationBundle = Annotated[Path | None, typer.Option("--evaluation", help="The bundle for --evaluate-every.")]

_LIKE = "Plan and settings of TASK, unless given."
LikeTask = Annotated[str | None, typer.Option("--like", metavar="TASK", help=_LIKE)]
_UNSET = "With --like: take the default; repeatable."
Unset = Annotated[list[str] | None, typer.Option("--unset", metavar="SETTING", help=_UNSET)]

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="The task's id, from `muster task list`.")]

with_task_settings = with_settings(
    TaskSettings,
    spread=("budget", "secagg", "clear", "buffered"),
    defaults={"population": None, "goal": None, "rounds": None},
)
"""Have a command take the settings of a task as options; its parameter `settings` gets those given, as a mapping."""
