"""Expressions of tokenizers: what devices know of them.

Devices match in a time that is linear in the text, which needs groups that do not repeat. The same as
device_runtime/js/src/core/expression.ts. Spec: docs/spec/plan.md §1.3.
"""

from __future__ import annotations

import re

TOKEN = re.compile(
    r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\((?:\?(?:i?:|[=!]|.?))?|(?:[*+?]|\{\d+(?:,\d*)?\})[*+?]?|.", re.DOTALL
)
"""A part of an expression."""
ESCAPE = r"\\(?:[pP]\{(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfnos]?)\}|[sd])"
LETTER = r"(?:\\[nrtfv]|\\[^A-Za-z0-9]|&(?!&)|[^\[\]\\&-])"
CLASS = rf"\[(?!\^?\])\^?-?(?:{ESCAPE}|{LETTER}(?:-{LETTER})?)*-?\]"
KNOWN = re.compile(rf"[^$^{{[\\]|\\[SDnrtfv]|\\[^A-Za-z0-9]|{ESCAPE}|{CLASS}", re.DOTALL)
"""One letter: itself, an escape or a class."""
OF_LETTERS = re.compile(r"""(?!.*(?:[sS][sStT]|[fF][fFiIlL]))[ !"#%&',/0-9:;<=>@A-Z_`a-z~|-]*""")
"""What may be in a group that ignores the case, where no two letters are one in another case, such as ß."""
REPEATS = re.compile(r"(?:[*+?]|\{(\d+),?(\d*)\})([*+?]?)")
GROUPS = {"(", "(?:", "(?i:"}
LOOKS = {"(?=", "(?!"}
COUNTED = re.compile(r"\{(\d+),?(\d*)\}")
LONGEST, MOST_COUNTED = 2000, 200


def unknown_in(expression: str) -> str:
    """What devices do not know in an expression that the library takes; else ""."""
    counts = [int(most or least) for least, most in COUNTED.findall(expression)]
    if len(expression) > LONGEST or sum(counts) > MOST_COUNTED:
        return "an expression that is too long"
    parts = TOKEN.findall(expression)
    found = (_unknown(part, parts[:place], parts[place + 1 :]) for place, part in enumerate(parts))
    return next(filter(None, found), "")


def _unknown(part: str, before: list[str], after: list[str]) -> str:
    if repeats := REPEATS.fullmatch(part):
        return _unknown_repetition(repeats, before)
    if part in LOOKS:
        is_one = len(after) > 1 and KNOWN.fullmatch(after[0]) and after[0] not in "()|" and after[1] == ")"
        is_alone = not {*before[-1:]} - {"|", *GROUPS} and not {*after[2:3]} - {"|", ")"}
        return ("a look alone" if is_alone else "") if is_one else "a look at more than the next letter"
    if part in GROUPS:
        inside = "".join(after).partition(")")[0]
        is_known = part != "(?i:" or OF_LETTERS.fullmatch(inside)
        return "" if is_known else "a group that ignores the case of more than letters"
    if part.startswith("("):
        return f"a group that begins with {part}"
    return "" if KNOWN.fullmatch(part) else f"the part {part}"


def _unknown_repetition(repeats: re.Match[str], before: list[str]) -> str:
    least, most, more = repeats.groups(default="")
    if more:
        return "a repetition that is lazy or possessive"
    if not before or before[-1] in ("|", *GROUPS, *LOOKS) or REPEATS.fullmatch(before[-1]):
        return "a repetition of nothing"
    if before[-1] == ")" and (repeats[0] != "?" or LOOKS.intersection(before[-3:-2])):
        return "a group that repeats"
    return "a repetition that ends before it begins" if most and int(most) < int(least) else ""
