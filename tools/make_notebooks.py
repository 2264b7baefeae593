"""The notebooks in examples/: `make notebooks` runs them from top to bottom, and keeps the outputs of that run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LIMIT_S = 200
"""Seconds of a cell."""


def run(path: Path, folder: Path) -> Any:
    """The notebook with its outputs, run in a folder. Raises CellExecutionError."""
    import nbformat
    from nbclient import NotebookClient  # take a second, which a list of the notebooks does not need

    book = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=LIMIT_S, record_timing=False, resources=resources).execute()
    book.metadata["language_info"] = {"name": "python"}  # the rest is this machine's version
    return book


def main() -> None:
    """Run every notebook, each in an empty folder, and keep its outputs."""
    import nbformat

    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run(path, Path(folder)), path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
