"""Messages about unknown names: what there is, and the closest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def offered(name: object, choices: Iterable[str]) -> str:
    """All `choices`, after the closest if one is close: `did you mean b? there are a, b`.

    A choice that contains `name`, as `client_lr` contains `lr`, is closer than one with a similar spelling.
    """
    typed, names = str(name), list(choices)
    holding = [candidate for candidate in names if len(typed) > 1 and typed in candidate]
    close = difflib.get_close_matches(typed, names, 1, 0.8) or holding or difflib.get_close_matches(typed, names, 1)
    return f"{f'did you mean {close[0]}? ' if close else ''}there are {', '.join(names)}"
