"""Checked data: decoders of structs, settings that describe themselves, unknown names, and a user's own code."""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields as dataclass_fields, is_dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec

# Decoders and converters of structs. Modules build them only at import.
#
# msgspec inspects a type when it first meets it, and keeps the result with the type. If several threads do that at once
# for one type, the process ends in a segmentation fault (msgspec 0.22). Two modules that share a type may be imported
# at the same time, so a lock lets one thread build at a time.


T = TypeVar("T")
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that a decoder raises for bytes that it cannot decode."""
_building = Lock()


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """A decoder of JSON. Its `decode` raises one of UNDECODABLE, or an error of the type's own checks."""
    with _building:
        return msgspec.json.Decoder(kind)


def decoded(
    data: str | bytes, kind: msgspec.json.Decoder[T], noun: str, error: type[Exception], version: int | None = None
) -> T:
    """What JSON says, such as a signed statement whose signature the caller has checked.

    noun: what it is, for messages. version: the only one that this side knows, if things of this kind have one.
    Raises `error` for what is malformed or of another version.
    """
    try:
        found = kind.decode(data)
    except UNDECODABLE as reason:
        raise error(f"malformed {noun}: {reason}") from reason
    if (found_version := getattr(found, "version", version)) != version:
        raise error(f"{noun} of version {found_version}, this side knows {version}")
    return found


def converter(
    kind: type[T], *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None
) -> Callable[[object], T]:
    """A function from plain values (dicts, lists, numbers, text) to a `kind`; it raises msgspec.ValidationError.

    strict, dec_hook: as in `msgspec.convert`.
    """
    decoder(kind)  # which describes the type and all that it holds
    return partial(msgspec.convert, type=kind, strict=strict, dec_hook=dec_hook)


# Settings that describe themselves: the annotation of a field is its check; unknown names; a user's own code.


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Kind: TypeAlias = Literal["flag", "whole number", "number", "choice", "list", "path", "text", "mapping", "part"]

LONGEST_SENTENCE = 200
"""The longest sentence for the owners of devices, in characters."""

NEEDED = msgspec.NODEFAULT
"""The default of a setting that has none."""
_LEAVES: dict[Any, Kind] = {
    bool: "flag",
    int: "whole number",
    float: "number",
    tuple: "list",
    Literal: "choice",
    Path: "path",
    dict: "mapping",
}
_ROOM = 2**31 - 1
"""Bounds from here on say only what a number has room for."""
_SIDES = ("ge", "gt", "le", "lt")
_WORDED = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "from": "from ", "and": " and "}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "from": "", "and": ", "}
_WORDS = {"yes": "true", "no": "false"}
_ABSENT = {type(None), msgspec.UnsetType}


def setting(about: str, *, unit: str = "", allowed: str = "", **bounds: Any) -> msgspec.Meta:
    """What an annotated field is, in a sentence, with its unit and its bounds, those of `msgspec.Meta`.

    allowed: what it may be, in words, where its type and bounds do not say it.
    """
    return msgspec.Meta(description=about, extra={"unit": unit, "allowed": allowed}, **bounds)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting as people read it: `allowed` says what it may be, and `range` that without its type.

    default: NEEDED where there is none, None where it may be left out. part: the class of the settings in it.
    optional: whether it may be None.
    """

    name: str
    about: str
    unit: str
    kind: Kind
    allowed: str
    range: str
    default: Any
    choices: tuple[str, ...] = ()
    part: type | None = None
    optional: bool = False

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is NEEDED

    @property
    def shown_default(self) -> str:
        """Its default as people write it; "" without one."""
        return "" if self.required else text_of(self.default)

    @property
    def facts(self) -> str:
        """Its range and its default, as far as there is something to say."""
        default = "" if self.kind == "flag" else self.shown_default
        return "; ".join(words for words in (self.range, default and f"default: {default}") if words)


def text_of(value: object) -> str:
    """A value as people write it, in a form or an option; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class _Checks:
    """What is known of a class of settings: the error of its values, and a converter of each, for values and text."""

    error: type[Exception]
    settings: Mapping[str, Setting]
    values: Mapping[str, Callable[[object], Any]]
    texts: Mapping[str, Callable[[object], Any]]


_CHECKS: dict[type, _Checks] = {}


def checked(error: type[Exception]) -> Callable[[type[T]], type[T]]:
    """Decorate a struct or a dataclass of settings, whose `__post_init__` calls `check`. error: of a wrong value."""

    def decorate(kind: type[T]) -> type[T]:
        """Describe the class to itself, at import."""
        hints = get_type_hints(kind, include_extras=True)
        found = {name: _described(name, hints[name], default) for name, default in _defaults(kind).items()}
        values, texts = (
            {name: converter(hints[name], strict=strict, dec_hook=_made_of_text) for name in found}
            for strict in (True, False)
        )
        _CHECKS[kind] = _Checks(error, found, values, texts)
        return kind

    return decorate


def settings_of(kind: type) -> tuple[Setting, ...]:
    """The settings of a class that is `checked`, in order."""
    return tuple(_CHECKS[kind].settings.values())


def check(values: object) -> None:
    """Raise the error of its class, naming the first setting that is not what it may be."""
    checks = _CHECKS[type(values)]
    for name, one in checks.settings.items():
        value = getattr(values, name)
        if value is not msgspec.UNSET and isinstance(_converted(checks, name, value), Path):
            demand(checks.error, isinstance(value, Path), name, one.allowed, value)


def demand(error: type[Exception], met: bool, name: str, allowed: str, value: object) -> None:
    """Raise an error that names a setting, what it may be and what it is, unless `met`."""
    if not met:
        raise error(f"{name} must be {allowed}, not {value!r}")


def build(kind: type[T], given: Mapping[str, Any], *, text: bool = False) -> T:
    """Settings of plain values, such as JSON and TOML have; parts are mappings. text: values may be text.

    Raises the error of the class, naming the setting that is unknown, missing or not what it may be.
    """
    made = {name: build_one(kind, name, value, text=text) for name, value in given.items()}
    for one in settings_of(kind):
        if one.required and one.name not in made:
            raise _CHECKS[kind].error(_missing(one))
    return kind(**made)


def complaints(kind: type, given: Mapping[str, Any], *, text: bool = False) -> dict[str, str]:
    """What `build` has against each setting by itself, by name, such as `secagg.bits`; nothing of how they fit."""
    found = {one.name: _missing(one) for one in settings_of(kind) if one.required and one.name not in given}
    for name, value in given.items():
        part = _CHECKS[kind].settings[name].part
        if part in _CHECKS and isinstance(value, Mapping):
            within = complaints(part, value, text=text)
            found |= {f"{name}.{inner}": f"{name}: {words}" for inner, words in within.items()}
            continue
        try:
            build_one(kind, name, value, text=text)
        except _CHECKS[kind].error as error:
            found[name] = str(error)
    return found


def build_one(kind: type, name: str, value: object, *, text: bool = False) -> Any:
    """One setting of a class, of a plain value. Raises as `build`."""
    checks = _CHECKS[kind]
    if name not in checks.settings:
        raise checks.error(f"there is no {name!r}; {offered(name, checks.settings)}")
    one = checks.settings[name]
    if one.part in _CHECKS and isinstance(value, Mapping):
        try:
            return build(one.part, value, text=text)
        except _CHECKS[one.part].error as error:
            raise checks.error(f"{name}: {error}") from error
    if text and isinstance(value, str):
        value = [word.strip() for word in value.split(",")] if one.kind == "list" else _WORDS.get(value, value)
    return _converted(checks, name, value, text=text)


def _missing(one: Setting) -> str:
    return f"{one.name} is missing: it must be {one.allowed}"


def _converted(checks: _Checks, name: str, value: object, *, text: bool = False) -> Any:
    convert = (checks.texts if text else checks.values)[name]
    try:
        made = convert(value)
    except msgspec.ValidationError:
        made = math.nan
    if isinstance(made, float) and not math.isfinite(made):
        given = value if text else repr(value)
        raise checks.error(f"{name} must be {checks.settings[name].allowed}, not {given}")
    return made


def _made_of_text(kind: type, value: Any) -> Any:
    return kind(value) if kind is Path and isinstance(value, str | Path) else value


def _defaults(kind: Any) -> dict[str, Any]:
    """The default of each field; None for one that is made anew each time, as an empty mapping is."""
    if is_dataclass(kind):
        given = {one.name: one.default if one.default_factory is MISSING else None for one in dataclass_fields(kind)}
        return {name: NEEDED if default is MISSING else default for name, default in given.items()}
    fields = msgspec.structs.fields(kind)
    return {one.name: one.default if one.default_factory is msgspec.NODEFAULT else None for one in fields}


def _described(name: str, hint: Any, default: Any) -> Setting:
    metas, kinds = _taken_apart(hint)
    leaf = next(one for one in kinds if one not in _ABSENT)
    names = getattr(leaf, "__struct_fields__", None) or tuple(getattr(leaf, "__dataclass_fields__", ()))
    kind: Kind = "part" if names else _LEAVES.get(get_origin(leaf) or leaf, "text")
    choices = tuple(map(str, get_args(leaf))) if kind == "choice" else ()
    extra = {key: value for meta in metas for key, value in (meta.extra or {}).items() if value}
    sides = {side: bound for meta in metas for side in _SIDES if (bound := getattr(meta, side)) is not None}
    noun = {
        "flag": "true or false",
        "list": "names",
        "text": "text",
        "choice": f"one of {', '.join(choices)}",
        "part": f"{getattr(leaf, '__name__', '')}(…), or a mapping with some of {', '.join(names)}",
    }.get(kind, f"a {kind}" + (f" of {extra['unit']}" if "unit" in extra else ""))
    bounds = _bounds(sides, _WORDED)
    allowed = extra.get("allowed") or noun + (", " if bounds.startswith("at ") else " " if bounds else "") + bounds
    meant = {side: bound for side, bound in sides.items() if bound < _ROOM}
    return Setting(
        name=name,
        about=next((meta.description for meta in metas if meta.description), ""),
        unit=extra.get("unit", ""),
        kind=kind,
        allowed=allowed,
        range=extra.get("allowed") or ", ".join(choices) or _bounds(meant, _SIGNS),
        default=default,
        choices=choices,
        part=leaf if names else None,
        optional=type(None) in kinds,
    )


def _taken_apart(hint: Any) -> tuple[list[msgspec.Meta], list[Any]]:
    """All annotations in a hint, and the types that it is one of."""
    if get_origin(hint) is Annotated:
        metas, kinds = _taken_apart(get_args(hint)[0])
        return [*(one for one in hint.__metadata__ if isinstance(one, msgspec.Meta)), *metas], kinds
    if _ABSENT.isdisjoint(get_args(hint)):
        return [], [hint]
    both = [_taken_apart(one) for one in get_args(hint)]
    return [meta for metas, _ in both for meta in metas], [kind for _, kinds in both for kind in kinds]


def _bounds(sides: Mapping[str, float], words: Mapping[str, str]) -> str:
    """Bounds in words, such as `from 2 to 20` or `above 0`, or in signs."""
    if "ge" in sides and "le" in sides:
        return f"{words['from']}{_figure(sides['ge'])} to {_figure(sides['le'])}"
    return words["and"].join(f"{words[side]} {_figure(bound)}" for side, bound in sides.items())


def _figure(bound: float) -> str:
    """A bound as people read it: those at a power of two, which are long, as that."""
    power = round(math.log2(bound)) if bound > 1 else 0
    if power >= 20 and 0 <= 2**power - bound <= 1:
        return f"2^{power}" + (" - 1" if bound < 2**power else "")
    return f"{bound:,.10g}"


def offered(name: object, choices: Iterable[str]) -> str:
    """All `choices`, after the closest if one is close: `did you mean b? there are a, b`.

    A choice that contains `name`, as `client_lr` contains `lr`, is closer than one with a similar spelling.
    """
    typed, names = str(name), list(choices)
    holding = [candidate for candidate in names if len(typed) > 1 and typed in candidate]
    close = difflib.get_close_matches(typed, names, 1, 0.8) or holding or difflib.get_close_matches(typed, names, 1)
    return f"{f'did you mean {close[0]}? ' if close else ''}there are {', '.join(names)}"


# A user's own code, by the name of a module, which is looked up in the working folder too, or of a file there.
#
# Importing a module runs its author's code, so callers import only a module that an authorised person has named.


def own_name(name: str) -> str:
    """`package.module:object` of what may be `package/module.py:object`, a file in the working folder; others as is."""
    source, colon, thing = name.partition(":")
    path = Path(source).resolve()
    if path.suffix != ".py" or not path.is_relative_to(Path.cwd()):
        return name
    return ".".join(path.relative_to(Path.cwd()).with_suffix("").parts) + colon + thing


def import_own(module: str) -> ModuleType:
    """The module of that name. Raises ImportError for a file elsewhere, and whatever the module's code raises."""
    module = own_name(module)
    if module.endswith(".py"):
        raise ImportError(f"{module} is not in the working folder; go to {Path(module).resolve().parent} for it")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        words = f"no module named {module!r}; the working folder has no {module.replace('.', '/')}.py"
        raise ModuleNotFoundError(words, name=error.name) from error
