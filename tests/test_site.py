"""The documents' site: it is built without a warning, and asks no other host for anything."""

import html
import re
import subprocess
import sys

import pytest

import muster
from coordinator.api.http import ADMIN_PROBLEMS
from coordinator.monitoring import Metrics
from coordinator.operations import OPERATIONS, PREFIX
from coordinator.settings import Settings
from tests.tree import ROOT, files

LOADED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]*)"')
CELL = re.compile(r"<td>(.*?)</td>", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(https?:")
NOTEBOOK = "examples/first_federated_model"
DOCUMENTS = ("README", "commands", "operations", "python", "settings", "algorithms", "decisions/0001-flat-vectors")
BUILT = ("README.md", *(f"docs/{name}.md" for name in DOCUMENTS), f"{NOTEBOOK}.ipynb")
INCOMPLETE = (
    "WARNING: search index couldn't be loaded, but not all documents will be built: the index will be incomplete.\n"
)


def sphinx(folder, *options):
    """Run Sphinx with its state in a folder; what it returns and warns of."""
    command = [sys.executable, "-m", "sphinx", "-q", "--no-color", "-c", "docs", "-d", folder / "kept", *options]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Some pages of the site, as HTML. All are read and their references resolved; writing takes twice as long."""
    folder = tmp_path_factory.mktemp("site")
    assert sphinx(folder, "-W", "--keep-going", "-b", "dummy", ".", folder / "nothing") == (0, "")
    assert sphinx(folder, "-b", "html", ".", folder / "site", *BUILT) == (0, INCOMPLETE)
    return {str(path.relative_to(folder / "site")): path.read_text() for path in (folder / "site").rglob("*.html")}


def test_the_site_is_built_without_a_warning_and_loads_nothing_of_others(pages):
    assert {"docs/README.html", "README.html", "docs/decisions/0001-flat-vectors.html"} <= pages.keys()
    assert {name: LOADED.findall(text) for name, text in pages.items() if LOADED.findall(text)} == {}
    assert [path for path in files(".md", ".ipynb") if PICTURE.search(path.read_text())] == []
    assert '<a class="reference external" href="fedcore"' not in pages["README.html"]
    assert "url=docs/README.html" in pages["index.html"]


def test_the_site_has_the_help_of_every_command(pages):
    commands = pages["docs/commands.html"]
    for name in ("muster task create", "muster simulate", "muster device"):
        assert f"<h2>{name}<" in commands
    assert "--over-selection" in commands


def test_the_site_has_every_setting_problem_operation_and_metric(pages):
    page = html.unescape(re.sub("<(?!/?td)[^>]+>", "", pages["docs/operations.html"])).replace("’", "'")
    cells = set(CELL.findall(page))
    for name, field in Settings.model_fields.items():
        assert {name, field.description} <= cells
    assert ADMIN_PROBLEMS.keys() <= cells
    assert {f"{one.method} {PREFIX}{one.path}" for one in OPERATIONS} <= cells
    samples = {family.name + "_total" * (family.type == "counter") for family in Metrics().registry.collect()}
    assert len(samples) > 20
    assert samples <= cells


def test_the_site_has_what_documents_leave_to_the_code(pages):
    assert [name for name in muster.__all__ if f'id="muster.{name}"' not in pages["docs/python.html"]] == []
    assert 'id="muster.Coordinator.create"' in pages["docs/python.html"]
    assert '<section id="secagg-of-a-simulation">' in pages["docs/settings.html"]
    assert 'href="#fedadam"' in pages["docs/algorithms.html"]
    assert '<section id="fedadam">' in pages["docs/algorithms.html"]


def test_notebooks_are_pages_and_decisions_are_folded(pages):
    assert f'href="../{NOTEBOOK}.html"' in pages["docs/README.html"]
    assert re.search(r'<div class="highlight-python.*?<span class="n">muster</span>', pages[f"{NOTEBOOK}.html"], re.S)
    assert (
        '<li class="toctree-l2"><a class="reference internal" href="decisions/0001-flat-vectors.html">'
        in pages["docs/README.html"]
    )
