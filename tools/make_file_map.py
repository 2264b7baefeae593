"""`make filemap`: the file map of docs/architecture.md, written anew from the first sentences of module docstrings.

Run it when a module comes, goes, moves, or opens with other words. tests/test_docs.py holds the map against the tree.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
HEADING = "## Where things are\n"
INTRODUCTION = (
    "Every module of the nine packages, with the first sentence of its docstring. `make filemap` writes this section."
)
PACKAGES = (
    "fedcore",
    "secagg",
    "export",
    "ingress",
    "authority",
    "coordinator",
    "device_runtime",
    "simulator",
    "muster",
)


def phrase(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"\.(?: |$)", summary, maxsplit=1)[0].replace("|", "\\|")


def modules(package: str) -> dict[str, Path]:
    """The modules of a package by their names in the map; a folder stands for its `__init__.py`."""
    paths = sorted(
        (ROOT / package).rglob("*.py"), key=lambda path: (path.parent.parts, path.name != "__init__.py", path)
    )
    named = ((str(path.relative_to(ROOT / package)).removesuffix("__init__.py"), path) for path in paths)
    return {name or "(the package)": path for name, path in named}


def document() -> str:
    """The document with its last section, the map, made anew."""
    tables = [
        f"### `{package}`\n\n| file | is |\n|---|---|\n"
        + "".join(f"| `{name}` | {phrase(path)} |\n" for name, path in modules(package).items())
        for package in PACKAGES
    ]
    return DOCUMENT.read_text().partition(HEADING)[0] + "\n".join([HEADING, INTRODUCTION + "\n", *tables])


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
