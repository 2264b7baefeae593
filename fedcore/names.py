"""Messages about unknown names: what there is, and the closest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def offered(name: object, known: Iterable[str]) -> str:
    """The closest of the `known` names, where one is close, and all of them: `did you mean b? there are a, b`.

    A name that holds the given one, such as `client_lr` of `lr`, is closer than one that is spelt a little alike.
    """
    given, names = str(name), list(known)
    holding = [one for one in names if len(given) > 1 and given in one]
    close = difflib.get_close_matches(given, names, 1, 0.8) or holding or difflib.get_close_matches(given, names, 1)
    return f"{f'did you mean {close[0]}? ' if close else ''}there are {', '.join(names)}"
