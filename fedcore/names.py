"""Messages about unknown names: what there is, and the closest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def offered(name: object, known: Iterable[str]) -> str:
    """The closest of the `known` names, where one is close, and all of them: `did you mean b? there are a, b`."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, 1)
    return f"{f'did you mean {close[0]}? ' if close else ''}there are {', '.join(names)}"
