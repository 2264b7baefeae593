"""A user's own code, by the name of a module, which is looked up in the working folder too, or of a file there.

Importing a module runs its author's code, so callers import only a module that an authorised person has named.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


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
