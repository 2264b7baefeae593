"""The documents' site: it is built without a warning, and asks no other host for anything."""

import re
import subprocess
import sys

from tests.tree import ROOT

LOADED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]*)"')


def test_the_site_is_built_and_complete(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-b", "html", ".", site]
    done = subprocess.run([*command, "-d", tmp_path / "kept"], check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    assert {"docs/README.html", "README.html", "docs/decisions/0001-flat-vectors.html"} <= pages.keys()
    assert {name: LOADED.findall(text) for name, text in pages.items() if LOADED.findall(text)} == {}
    commands = pages["docs/commands.html"]
    for name in ("muster task create", "muster simulate", "muster device"):
        assert f"<h2>{name}<" in commands
    assert "--over-selection" in commands
    assert "Decision 1" in pages["docs/README.html"]
    assert '<a class="reference external" href="fedcore"' not in pages["README.html"]
