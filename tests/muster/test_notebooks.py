"""The notebooks in examples/ run from top to bottom, as Jupyter runs them, and are kept without their outputs."""

import os

import pytest

from tests.tree import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture
def away(tmp_path, commands, monkeypatch):
    """A folder to run in, where commands and modules are those of this tree."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, away):
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(away)}}).execute()
    shown = {kind for cell in book.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert "image/svg+xml" in shown or path.stem == "notebook_to_task"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []
