"""The documents' site, by Sphinx: `make docs` builds it in site/. Pages, order and titles are those of docs/README.md.

The root of the repository is the source, so that links between documents mean the same here as where they are read.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer

ROOT = Path(__file__).parents[1]
project = "Muster"
extensions = ["myst_parser"]
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md"]
root_doc = "docs/README"
html_theme = "furo"  # light and dark, for phones too, and nothing from another host
html_title = "Muster"
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4
# Documents begin sections as deep as their text needs, and show code in languages that no highlighter knows.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

PAGES = [ROOT / name for name in include_patterns[:-1]]
INDEX, COMMANDS = "docs/README", "docs/commands"
SECTION, ENTRY = re.compile(r"^## (.+)$", re.MULTILINE), re.compile(r"^\* \[(.+?)\]\((\S+?)\)", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s:]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)


def read(app: Any, name: str, source: list[str]) -> None:
    """What Sphinx reads of a document."""
    folder = (ROOT / name).parent
    source[0] = _without_others(source[0], folder)
    if name == INDEX:
        source[0] += "\n".join(_navigation(source[0]))
    if name == COMMANDS:
        source[0] += "\n".join(["", *_commands()])


def _without_others(text: str, folder: Path) -> str:
    """The text without links to folders and to documents of other parts, which are no pages."""

    def kept(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        page = target in PAGES or target.is_relative_to(ROOT / "docs") or target.suffix != ".md"
        return link[0] if target.is_file() and page else link[1]

    parts = CODE.split(text)
    return "".join(part if index % 2 else LINK.sub(kept, part) for index, part in enumerate(parts))


def _navigation(index: str) -> Iterator[str]:
    """A toctree for each section of the index."""
    heads = [*SECTION.finditer(index)]
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        entries = ENTRY.findall(index[head.end() : after.start() if after else None])
        titles = [(f"Decision {title}" if title.isdigit() else title, target) for title, target in entries]
        yield f"\n```{{toctree}}\n:hidden:\n:caption: {head[1]}\n"
        yield from (f"{title} <{target}>" for title, target in titles)
        yield "```\n"


def _commands() -> Iterator[str]:
    from muster.app import app  # as the command line has it

    os.environ["COLUMNS"] = "100"
    whole = typer.main.get_command(app)
    yield from _help(whole, click.Context(whole, info_name="muster", max_content_width=100))


def _help(command: click.Command, context: click.Context) -> Iterator[str]:
    path = context.command_path
    said = _help_of_device() if path == "muster device" else command.get_help(context)
    yield f"## {path}\n\n```text\n{said.rstrip()}\n```\n"
    for name, inner in getattr(command, "commands", {}).items():
        yield from _help(inner, click.Context(inner, info_name=name, parent=context))


def _help_of_device() -> str:
    """Of the one command that is not made with the others' framework."""
    from muster.commands import device

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        device.main(["--help"])
    return printed.getvalue()
