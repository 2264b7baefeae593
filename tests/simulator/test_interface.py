"""The names of the package `simulator`, as a notebook uses them."""

import re
import subprocess
import sys

import pytest

import simulator
from tests.tree import ROOT

PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_example_of_the_document_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = PROGRAM.findall((ROOT / "docs" / "simulation.md").read_text())
    found = {}
    exec(program, found)
    *_, first, users = capsys.readouterr().out.splitlines()
    assert float(first.split()[0]) > 0.2
    assert users.split()[0] == "75"
    assert found["weights"].shape == (found["result"].parameters,)
    assert found["run"].result.curve == found["result"].curve


def test_every_name_can_be_imported_and_others_are_named():
    assert [name for name in simulator.__all__ if getattr(simulator, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="module 'simulator' has no attribute 'simulat0r'"):
        simulator.simulat0r  # noqa: B018 - the attribute is the test


def test_the_package_itself_imports_nothing():
    program = "import sys, simulator; print(sorted({'torch', 'numpy', 'msgspec'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
