"""The notebooks in examples/ run from top to bottom, as Jupyter runs them, and are kept with the outputs of a run."""

import importlib.util
import json
import os
import re

import pytest

from research.pretrained_adapters import INSTALL, PACKAGE
from tests.sampled import sampled
from tests.tree import ROOT
from tools.make_notebooks import NOTEBOOKS, run

OF_A_MACHINE = re.compile(
    r"/(tmp|home|work|root|usr|dev)/|127\.0\.0\.1:\d|\d\d:\d\d:\d\d|\d{4}-\d\d-\d\d|at 0x|np\.\w+\("
)
IN_EVERY_RUN = [path for path in NOTEBOOKS if path.stem == "first_federated_model"]
MOST_BYTES = 100_000
"""Of one output."""


@pytest.fixture
def away(tmp_path, commands, monkeypatch):
    """A folder to run in, where modules are those of this tree, and commands and the kernel start at once."""
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    start = [str(commands / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": start, "display_name": "warm", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def outputs_of(book):
    """The outputs of each cell of code."""
    return [cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"]


def kinds(book):
    """The kinds of outputs of each cell of code. What is printed may come in one or in several."""
    each = [
        [(output["output_type"], *sorted(output.get("data", {}))) for output in outputs] for outputs in outputs_of(book)
    ]
    return [list(dict.fromkeys(outputs)) for outputs in each]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("path", sampled(NOTEBOOKS, IN_EVERY_RUN), ids=lambda path: path.stem)
def test_a_notebook_runs_to_outputs_of_the_kinds_that_are_kept(path, away):
    pytest.importorskip("nbclient")
    if PACKAGE in path.read_text() and importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"needs the weights of MiniLM: {INSTALL}")
    made = run(path, away)
    assert kinds(json.loads(path.read_text())) == kinds(made), "run `make notebooks`"
    assert "image/svg+xml" in str(kinds(made)) or path.stem == "notebook_to_task"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_that_are_kept_are_small_and_of_no_machine(path):
    book = json.loads(path.read_text())
    counts = [cell["execution_count"] for cell in book["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run `make notebooks`"
    for output in [output for outputs in outputs_of(book) for output in outputs]:
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"
        assert OF_A_MACHINE.findall(json.dumps(output)) == []
        assert len(json.dumps(output)) <= MOST_BYTES
