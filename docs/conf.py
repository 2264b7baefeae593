"""The documents' site, by Sphinx: `make docs` builds it in site/. Pages, order and titles are those of docs/README.md.

The root of the repository is the source, so that links between documents mean the same here as where they are read.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import click
import typer

ROOT = Path(__file__).parents[1]
project = "Muster"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md", "examples/*.ipynb"]
exclude_patterns = [".*", "site", "**/node_modules"]  # what Sphinx would look through for pages
root_doc = "docs/README"
html_theme = "furo"  # light and dark, for phones too, and nothing from another host
html_title = "Muster"
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4
# Documents begin sections as deep as their text needs, and show code in languages that no highlighter knows.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

Table: TypeAlias = tuple[tuple[str, ...], Iterable[tuple[str, ...]]]
PAGES = [ROOT / "docs", ROOT / "examples", *(ROOT / name for name in include_patterns[:3])]
INDEX, DECISIONS, COMMANDS = "docs/README", "docs/decisions/README", "docs/commands"
SECTION, ENTRY = re.compile(r"^## (.+)$", re.MULTILINE), re.compile(r"^\* \[(.+?)\]\((\S+?)\)", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s:]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^<!-- table: (.+) -->$", re.MULTILINE)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)
    app.connect("build-finished", begin_at_the_index)


def begin_at_the_index(app: Any, error: Exception | None) -> None:
    """Write the file that a web server shows of the whole site: it leads to the index."""
    if app.builder.name == "html":
        leads = f'<meta http-equiv="refresh" content="0; url={INDEX}.html">'
        (Path(app.outdir) / "index.html").write_text(leads, "utf-8")


def read(app: Any, name: str, source: list[str]) -> None:
    """What Sphinx reads of a document."""
    if Path(app.env.doc2path(name)).suffix == ".ipynb":
        source[0] = "\n\n".join(_notebook(source[0]))
    source[0] = _without_others(source[0], (ROOT / name).parent)
    source[0] = TABLE.sub(lambda found: "\n".join(_table(*TABLES[found[1]]())), source[0])
    if name == INDEX:
        source[0] += "\n".join(_navigation(source[0]))
    if name == DECISIONS:
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    if name == COMMANDS:
        source[0] += "\n".join(["", *_commands()])


def _without_others(text: str, folder: Path) -> str:
    """The text without links to folders and to documents of other parts, which are no pages."""

    def kept(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        page = target.suffix != ".md" or any(target.is_relative_to(one) for one in PAGES)
        return link[0] if target.is_file() and page else link[1]

    parts = CODE.split(text)
    return "".join(part if index % 2 else LINK.sub(kept, part) for index, part in enumerate(parts))


def _navigation(index: str) -> Iterator[str]:
    """A toctree for each section of the index."""
    heads = [*SECTION.finditer(index)]
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        entries = ENTRY.findall(index[head.end() : after.start() if after else None])
        yield f"\n```{{toctree}}\n:hidden:\n:caption: {head[1]}\n"
        yield from (f"{title} <{target.removesuffix('.ipynb')}>" for title, target in entries)
        yield "```\n"


def _notebook(text: str) -> Iterator[str]:
    """The cells of a notebook as Markdown, with the outputs that are in the file."""
    for cell in json.loads(text)["cells"]:
        written = "".join(cell["source"])
        yield written if cell["cell_type"] == "markdown" else f"```python\n{written}\n```"
        for output in cell.get("outputs", ()):
            kinds = {kind: "".join(value) for kind, value in output.get("data", {}).items() if "json" not in kind}
            picture = kinds.get("image/png")
            html = f'<img src="data:image/png;base64,{picture}">' if picture else kinds.get("text/html")
            html = kinds.get("image/svg+xml", html)
            plain = "".join(output.get("text", kinds.get("text/plain", "")))
            yield f"```{{raw}} html\n{html}\n```" if html else f"```text\n{plain}\n```"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield from (f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def _settings() -> Table:
    from coordinator.settings import Settings

    def shown(value: Any) -> str:
        empty = "–" if value in (None, "") else str(value).lower() if isinstance(value, bool) else ""
        return empty or (f"{value:g}" if isinstance(value, float) else str(value))

    rows = ((f"`{name}`", shown(one.default), one.description or "") for name, one in Settings.model_fields.items())
    return ("setting", "default", "meaning"), rows


def _problems() -> Table:
    from coordinator.api.admin.problems import ADMIN_PROBLEMS

    rows = ((f"`{slug}`", str(kind.status), kind.title) for slug, kind in ADMIN_PROBLEMS.items())
    return ("type", "status", "meaning"), rows


def _operations() -> Table:
    from coordinator.operations import OPERATIONS, PREFIX

    rows = ((f"`{one.method} {PREFIX}{one.path}`", one.role.value, one.sentence) for one in OPERATIONS)
    return ("operation", "role", "does"), rows


def _metrics() -> Table:
    from prometheus_client.metrics import MetricWrapperBase

    from coordinator.metrics import Metrics

    def row(one: Any) -> tuple[str, ...]:
        name = one._name + ("_total" if one._type == "counter" else "")
        return f"`{name}`", one._type, ", ".join(one._labelnames) or "–", one._documentation

    rows = (row(one) for one in vars(Metrics()).values() if isinstance(one, MetricWrapperBase))
    return ("metric", "kind", "labels", "meaning"), rows


TABLES: dict[str, Callable[[], Table]] = {
    "settings of the service": _settings,
    "problems of the admin API": _problems,
    "operations of the admin API": _operations,
    "metrics": _metrics,
}
"""What a page names in `<!-- table: NAME -->`: made from the code when the site is built, so that it has one home."""


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
