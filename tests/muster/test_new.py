"""`muster new`: the project runs as its README says."""

import json
import os
import re
import resource
import subprocess
import sys
import tomllib

import pytest

from muster.project import make_project
from tests.muster.test_cli import muster


def test_the_commands_of_its_readme_run(tmp_path, commands):
    status, out, err = muster("new", tmp_path / "key_board")
    assert status == 0, err
    project = tmp_path / "key_board"
    assert sorted(out.split()) == sorted(str(path) for path in project.rglob("*") if path.is_file())
    assert f"cd {project}" in err
    assert not [path for path in project.rglob("*") if path.is_file() and "$" in path.read_text()]
    (block,) = re.findall(r"```sh\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)
    # As the README has it: pytest is there, and none of the plugins that Muster's own tests need.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = os.environ | alone | {"PATH": f"{commands}:{os.environ['PATH']}"}
    for command in block.splitlines():
        done = subprocess.run(
            command, shell=True, cwd=project, env=environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (project / "plan" / "manifest.json").is_file()
    assert tomllib.loads((project / "simulation.toml").read_text())["model"] == "key_board.model:spec"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120", "--select", "E,F", project]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-app", "'my-app' cannot name a package"),
        ("class", "'class' cannot name a package"),
        ("simulator", "a package 'simulator' is installed here"),
        ("there", "there exists already"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_the_reason(tmp_path, name, words):
    (tmp_path / "there").mkdir()
    status, out, err = muster("new", tmp_path / name)
    assert (status, out) == (2, "")
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_project_that_does_not_fit_leaves_nothing(tmp_path):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, most[1]))
    try:
        with pytest.raises(OSError, match=r"keyboard.* cannot be written: File too large"):
            make_project(tmp_path / "keyboard")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert list(tmp_path.iterdir()) == []


def test_json_lists_the_files(tmp_path):
    status, out, _ = muster("new", tmp_path / "mine", "--json")
    assert status == 0
    assert len(json.loads(out)["files"]) == 7
