"""Algorithms of a user's own: frozen dataclasses, named as `package.module:Class`.

To import a module runs its author's code. So a module is imported only where somebody who may decide that has named
it: on a command line, or in the settings of a coordinator. What a plan, a bundle or a request says is not enough.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Container
from typing import Any

from fedcore.errors import InvalidAlgorithm, UnknownAlgorithm, UntrustedAlgorithm
from fedcore.validation import import_own, offered, own_name

_ALWAYS = ("name", "family", "weighting", "init")
_OF_A_TRIP = ("passes", "broadcast", "report", "update")
_OF_CLIENT_STATE = ("init_client", "keep")


def module_of(name: str) -> str:
    """The module that `package.module:Class` or `file.py:Class` names; empty for a built-in algorithm."""
    module, separator, _ = own_name(name).partition(":")
    return module if separator else ""


def own_algorithm(name: str, modules: Container[str]) -> type[Any]:
    """The class that `package.module:Class` names; its module is looked up in the working folder too.

    modules: those that may be imported.
    Raises UntrustedAlgorithm, UnknownAlgorithm, or InvalidAlgorithm for a class that is none of an algorithm.
    """
    module, _, cls = own_name(name).partition(":")
    if module not in modules:
        raise UntrustedAlgorithm(
            f"algorithm {name!r} is not built in, and a coordinator imports only modules that its settings name; if "
            f"you trust that code, put {module} into its setting `algorithms` (MUSTER_ALGORITHMS={module})"
        )
    try:
        imported = import_own(module)
    except Exception as error:  # whatever the user's own code raises
        words = str(error).strip().partition("\n")[0]
        raise UnknownAlgorithm(f"cannot import {name!r}: {type(error).__name__}: {words}") from error
    found = getattr(imported, cls, None)
    here = [one.__name__ for one in vars(imported).values() if isinstance(one, type) and one.__module__ == module]
    # Without this a name could reach every class that the module itself imports, such as one that starts processes.
    if not isinstance(found, type) or found.__module__ != module:
        raise UnknownAlgorithm(f"module {module} defines no algorithm {cls!r}; {offered(cls, here)}")
    _check_class(found)
    return found


def _check_class(cls: type[Any]) -> None:
    """Refuse what cannot be an algorithm, before it is made."""
    where = f"{cls.__name__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise InvalidAlgorithm(f"{where} is no frozen dataclass; put @dataclass(frozen=True) above it")
    required = (*_ALWAYS, "trips") if hasattr(cls, "trips") else (*_ALWAYS, *_OF_A_TRIP)
    if any(hasattr(cls, name) for name in _OF_CLIENT_STATE):
        required = (*required, *_OF_CLIENT_STATE)
    fields = {field.name for field in dataclasses.fields(cls)}
    lacking = [name for name in required if not hasattr(cls, name) and name not in fields]
    if lacking:
        raise InvalidAlgorithm(
            f"{where} lacks {', '.join(lacking)}; fedcore/algorithms/algorithm.py says what an algorithm has"
        )
    bare = [field.name for field in dataclasses.fields(cls) if "setting" not in field.metadata]
    if bare:
        raise InvalidAlgorithm(
            f"{where}: the fields {', '.join(bare)} are no settings; give each a default and a range by a function of "
            "fedcore.algorithms.settings, such as positive(0.1)"
        )
