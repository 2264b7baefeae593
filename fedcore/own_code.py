"""A user's own modules, which are looked up in the working folder too.

Importing a module runs its author's code, so callers import only a module that an authorised person has named.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_own(module: str) -> ModuleType:
    """The module of that name. Raises ImportError for the name of a file, and whatever the module's code raises."""
    if module.endswith(".py"):
        raise ImportError(f"{module} is a file; write {module.removesuffix('.py').replace('/', '.')}, its module")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(module)
