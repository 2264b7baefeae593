"""Options of a command as the fields of a dataclass, so that a command with many has one value for all of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo


def parameters_of(options: type) -> Iterator[inspect.Parameter]:
    """One keyword parameter for each field that has a `typer.Option`."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        hint = hints[field.name]
        if get_origin(hint) is Annotated and isinstance(get_args(hint)[1], OptionInfo):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def with_options(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a command of keyword parameters take the fields of `options` as options of its own.

    The command gets the value as its parameter `options`, and the fields stand at that parameter's place in its help.
    """
    taken = {one.name: one for one in parameters_of(options)}

    def decorate(act: Callable[..., None]) -> Callable[..., None]:
        """Give the command its options."""
        hints = get_type_hints(act, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, own in inspect.signature(act).parameters.items():
            parameters += taken.values() if name == "options" else [own.replace(annotation=hints[name])]

        @functools.wraps(act)
        def command(**given: Any) -> None:
            act(options=options(**{name: given.pop(name) for name in taken}), **given)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate
