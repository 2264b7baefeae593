"""The README, the tutorials and the how-to pages do what they say.

Each is followed by a reader who begins in an empty folder.
"""

import importlib.util
import os
import re

import pytest

from research.pretrained_adapters import INSTALL, PACKAGE
from tests.muster.reader import BLOCK, Reader
from tests.sampled import sampled
from tests.tree import ROOT
from tools.arm.build import build_wheel

TUTORIALS = ROOT / "docs" / "tutorials"
HOW_TO_FOLDER = ROOT / "docs" / "how-to"
HOW_TO = sorted(HOW_TO_FOLDER.glob("*.md"))
WITH_COMMANDS = [path for path in HOW_TO if "```sh\n" in path.read_text()]
MADE = {
    "researcher": ["curves.svg", "sweep/heat-map.svg", "sweep/table.csv", "loss.png"],
    "model-owner": ["runs/reader/learning-curve.svg", "runs/reader/model.safetensors", "plan/manifest.json"],
    "operator": ["model.safetensors", "muster.db"],
    "secure-task": ["muster-trial/release.pem", "muster.db"],
    "app-developer": ["rounds.svg", "app/examples/examples.db"],
    "pretrained-model": ["curves.svg", "merged/model.safetensors"],
    "from-training-to-prediction": ["rounds.svg", "release.pem", "app/state/state.db"],
}
OF_A_ROLE = ("researcher", "model-owner", "operator", "app-developer")
"""The tutorials that every run follows, one for each role."""
SHORT = [HOW_TO_FOLDER / f"{name}.md" for name in ("own-model-and-data", "release-a-model", "secure-task")]
"""The how-to pages that every run follows: what is in no tutorial of a role."""


@pytest.fixture
def environment(commands):
    """That of a shell whose commands start at once."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    return others | {"PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def test_every_tutorial_is_followed():
    assert sorted(MADE) == sorted(path.stem for path in TUTORIALS.glob("*.md"))


@pytest.mark.parametrize("name", sampled(MADE, OF_A_ROLE))
def test_a_tutorial_does_what_it_says_and_ends_with_its_picture(tmp_path, environment, name, request):
    if any(made.endswith(".png") for made in MADE[name]):
        request.getfixturevalue("font")
    folder, text = tmp_path / "empty", (TUTORIALS / f"{name}.md").read_text()
    if PACKAGE in text and importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"needs the weights of MiniLM: {INSTALL}")
    folder.mkdir()
    with Reader(folder, environment) as reader:
        reader.follow(text)
    assert [made for made in MADE[name] if not (folder / made).is_file()] == []
    assert re.findall(r"!\[.+\]\((.+)\)", text), "it shows no picture"


@pytest.mark.parametrize("path", sampled(WITH_COMMANDS, SHORT), ids=lambda path: path.stem)
def test_the_commands_of_a_how_to_page_work(tmp_path, environment, path):
    folder = tmp_path / "empty"
    folder.mkdir()
    with Reader(folder, environment) as reader:
        reader.follow(path.read_text())


def test_the_readme_does_what_it_says(tmp_path, environment):
    folder, text = tmp_path / "empty", (ROOT / "README.md").read_text()
    folder.mkdir()
    with Reader(folder, environment) as reader:
        reader.follow(text)
    assert (folder / "model.safetensors").is_file()
    claimed = re.search(r"ends at an accuracy of (0\.\d+)", text)[1]
    found = re.search(r"^test_accuracy +(\S+)", reader.output, re.MULTILINE)[1]
    assert abs(float(found) - float(claimed)) < 0.02  # float32 differs a little between processors


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_researcher_needs_nothing_but_the_package(tmp_path):
    wheels, folder = tmp_path / "wheels", tmp_path / "empty"
    folder.mkdir()
    wheels.mkdir()
    build_wheel(wheels)
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    with Reader(folder, environment | {"PIP_FIND_LINKS": str(wheels)}, installs=True) as reader:
        reader.follow((TUTORIALS / "researcher.md").read_text())
    assert [made for made in MADE["researcher"] if not (folder / made).is_file()] == []


def test_tutorials_and_how_to_pages_name_every_file_that_they_use():
    for path in [*TUTORIALS.glob("*.md"), *HOW_TO]:
        text = path.read_text()
        for language, block in BLOCK.findall(text):
            if language != "sh":
                assert re.match(r"# [\w.]+\n", block), f"{path.name}: a block of {language} begins with its file's name"
                assert f"`{block.splitlines()[0][2:]}`" in text
