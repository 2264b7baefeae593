"""Options of a command as one value: the fields of a dataclass, or the settings of a class that describes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

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
