"""The reference of `import muster`: `make reference` writes the last section of docs/python.md from docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import muster

DOCUMENT = Path(__file__).parents[1] / "docs" / "python.md"
HEADING = "## Reference\n"
INTRODUCTION = "Made from docstrings by `make reference`."


def signature(function: Any, name: str) -> str:
    """A function's signature, a parameter a line."""
    whole = inspect.signature(function)
    lines, keyword_only = [], False
    for parameter in whole.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            lines.append("*")
            keyword_only = True
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {shown(parameter.default)}"
        lines.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    return f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + f") -> {whole.return_annotation}"


def shown(default: Any) -> str:
    """A default value as a reader wants it."""
    return "…" if inspect.isfunction(default) else repr(default)


def described(member: Any) -> str:
    """A docstring, without its indentation."""
    return inspect.cleandoc(member.__doc__ or "")


def members(cls: type) -> list[str]:
    """A line for each public property and method of a class, in order of the source."""
    lines = []
    for name, member in vars(cls).items():
        target = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(target):
            continue
        words, *settings = re.split(r"\n+(?=\* `)", described(target))
        parameters = ", ".join(list(inspect.signature(target).parameters)[1:])
        call = name if isinstance(member, property) else f"{name}({parameters})"
        line = f"* `.{call}`: {' '.join(words.split())}"
        lines.append(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))
        lines += [textwrap.indent(line, "  ") for line in settings]
    return lines


def section(name: str) -> str:
    """The section of one name."""
    member = getattr(muster, name)
    own = member.__module__.startswith("muster.")
    head = f"### `muster.{name}`\n"
    if inspect.isfunction(member):
        head += f"\n```text\n{signature(member, f'muster.{name}')}\n```\n"
    body = textwrap.dedent(described(member))
    listed = "\n".join(members(member)) if inspect.isclass(member) and own else ""
    return "\n".join(part for part in (head, body + "\n", listed + "\n" if listed else "") if part)


def document() -> str:
    """The document with its reference made anew."""
    return DOCUMENT.read_text().partition(HEADING)[0] + "\n".join(
        [HEADING, INTRODUCTION + "\n", *map(section, muster.__all__)]
    )


if __name__ == "__main__":
    DOCUMENT.write_text(document().rstrip() + "\n")
    print(f"wrote {DOCUMENT}")
