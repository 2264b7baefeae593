"""Patterns of names, such as "head.*", in the grammar of file names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from export.errors import InvalidModel


def matching(what: str, patterns: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """The names that a pattern matches, in their order. Raises InvalidModel for a pattern that matches none.

    what: the names are of, for the message.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidModel(f"no {what} is called {pattern!r}; there are {', '.join(names) or 'none'}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
