"""Arguments of the Python API, whose kinds are checked where they come in, and progress in notebooks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar, cast

from fedcore.validation import Setting, settings_of
from muster.options import in_python
from muster.plain import OURS, rewrite

Function = TypeVar("Function", bound=Callable[..., Any])

MODEL = "a name, or a ModelSpec, which says how to make a module, its loss and its inputs (docs/models.md)"
ALGORITHM = "a name, or an object such as FedAdam(client_lr=0.1) (docs/algorithms.md)"
SETTINGS = 'a mapping such as {"client_lr": 0.1}'
_TYPES = {"flag": "bool", "whole number": "int", "number": "float", "path": "Path | str"}


def with_settings_of(kind: type, but: Collection[str] = ()) -> Callable[[Function], Function]:
    """Have a function with other keywords show the settings of a class, in its signature and its docstring.

    but: the settings that it has no keyword for.
    """
    taken = [setting for setting in settings_of(kind) if setting.name not in but]
    own = inspect.signature(kind).parameters
    keywords = [own[setting.name].replace(annotation=_annotation(setting)) for setting in taken]
    about = [
        f"* `{setting.name}`: {setting.about}" + (f" ({setting.facts})" if setting.facts else "") for setting in taken
    ]
    lines = [textwrap.fill(line, 116, subsequent_indent="  ", break_on_hyphens=False) for line in about]

    def decorate(act: Function) -> Function:
        """Give the function its keywords."""
        whole = inspect.signature(act)
        shown = [keyword for keyword in whole.parameters.values() if keyword.kind is not keyword.VAR_KEYWORD]
        act.__signature__ = whole.replace(parameters=[*shown, *keywords])  # type: ignore[attr-defined]
        act.__doc__ = "\n\n".join([inspect.cleandoc(act.__doc__ or ""), "\n".join(lines)])
        return act

    return decorate


def _annotation(setting: Setting) -> str:
    """The type of a setting, as people write it."""
    if setting.part is not None:
        kind = f"{setting.part.__name__} | Mapping[str, Any]"
    else:
        kind = f"Literal{list(setting.choices)}" if setting.choices else _TYPES.get(setting.kind, "str")
    return f"{kind} | None" if setting.optional else kind


def speaking_python(act: Function) -> Function:
    """Have our errors, which name options of commands, name keywords in their place."""

    @functools.wraps(act)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return act(*args, **kwargs)
        except Exception as error:
            if type(error).__module__.partition(".")[0] in OURS:
                error.args = tuple(in_python(words) if isinstance(words, str) else words for words in error.args)
            raise

    return cast("Function", call)


def of_kind(name: str, value: object, kinds: tuple[Any, ...], expected: str) -> None:
    """Raise TypeError, saying what is expected, unless the value of an argument is of one of the kinds."""
    if not isinstance(value, kinds):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise TypeError(f"{name} is {given}; expected {expected}")


def check_trained(model: object, algorithm: object, settings: object) -> None:
    """Raise TypeError unless a model, an algorithm and its settings are what `simulate` and `export` take."""
    from export.model import ModelSpec  # needs torch, which a coordinator has not

    of_kind("model", model, (str, ModelSpec), MODEL)
    made = dataclasses.is_dataclass(algorithm) and not isinstance(algorithm, type) and hasattr(algorithm, "weighting")
    if not made:
        of_kind("algorithm", algorithm, (str,), ALGORITHM)
    of_kind("settings", settings, (Mapping, type(None)), SETTINGS)
    if settings and made:
        raise TypeError("settings are for an algorithm that is named: an object has its own")


EVERY_S = 0.2
"""Seconds from one line to the next, at least: a round may take a millisecond."""


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A block with a function that shows a text in place of the one before; the last one is shown in any case."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        yield lambda text: None
        return
    show = _in_notebook() if hasattr(shell, "kernel") else rewrite
    latest, shown_at = "", -EVERY_S

    def tell(text: str) -> None:
        nonlocal latest, shown_at
        latest = text
        if monotonic() >= shown_at + EVERY_S:
            shown_at = monotonic()
            show(text)

    try:
        yield tell
    finally:
        if latest:
            show(latest, "\n")


def _in_notebook() -> Callable[..., None]:
    """What shows a line as an output of the cell, which the next line replaces."""
    handles: list[Any] = []

    def show(text: str, end: str = "") -> None:
        if handles:
            handles[0].update({"text/plain": text}, raw=True)
        else:
            handles.append(sys.modules["IPython"].display.display({"text/plain": text}, raw=True, display_id=True))

    return show
