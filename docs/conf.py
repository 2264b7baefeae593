"""The documents' site, by Sphinx: `make docs` builds it in site/. Pages, order and titles are those of docs/README.md.

The root of the repository is the source, so that links between documents mean the same here as where they are read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.pages import whole  # noqa: E402 - which lies in no package

project = "Muster"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
autodoc_member_order = "bysource"
default_role = "code"  # a single back-tick in docstrings
python_maximum_signature_line_length = 100
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

PAGES = [ROOT / "docs", ROOT / "examples", *(ROOT / name for name in include_patterns[:3])]
INDEX, DECISIONS = "docs/README", "docs/decisions/README"
SECTION, ENTRY = re.compile(r"^## (.+)$", re.MULTILINE), re.compile(r"^\* \[(.+?)\]\((\S+?)\)", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s:]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


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
    source[0] = _without_others(whole(source[0]), (ROOT / name).parent)
    if name == INDEX:
        source[0] += "\n".join(_navigation(source[0]))
    if name == DECISIONS:
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


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
