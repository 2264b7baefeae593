"""What a newcomer follows: tutorials, notebooks, and algorithms of their own."""

import importlib.util
import json
import os
import re
import shlex
import sys

import pytest
from typer.testing import CliRunner

from coordinator.store.tasks import open_coordinator_store
from fedcore.errors import InvalidAlgorithm, UntrustedAlgorithm
from muster.app import app
from research.pretrained_adapters import INSTALL, PACKAGE
from tests.muster.reader import BLOCK, Reader
from tests.sampled import sampled
from tests.tree import ROOT
from tools.arm import build_wheel
from tools.make_notebooks import NOTEBOOKS, run

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
    assert sorted([*MADE, "android-app"]) == sorted(path.stem for path in TUTORIALS.glob("*.md"))


def test_the_first_android_app_is_compiled_with_the_library():
    """`make android` compiles it; a coordinator's round with such an app is RoundTest."""
    source = ROOT / "device_runtime" / "android" / "android" / "src" / "test" / "kotlin" / "FirstApp.kt"
    (code,) = re.findall(
        r"^```kotlin\n// FirstApp.kt\n(import .*?)^```$",
        (TUTORIALS / "android-app.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert source.read_text().endswith(f"\n{code}")


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
                named = re.match(r"(?:#|//|<!--) ([\w.]+)(?: -->)?\n", block)
                assert named, f"{path.name}: a block of {language} begins with its file's name"
                assert f"`{named[1]}`" in text


MY_ALGOS = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcore.algorithms.fed_avg import FedAvg


@dataclass(frozen=True, slots=True)
class FedMine(FedAvg):
    name: ClassVar[str] = "fedmine"

    def update(self, state, mean, step=None):
        return {"params": state["params"] + 0.5 * mean["delta"]}


@dataclass(frozen=True, slots=True)
class FedRoot(FedAvg):
    name: ClassVar[str] = "fedroot"

    def report(self, broadcast, carries):
        return {"delta": np.sqrt(carries["train"]["params"])}
"""


@pytest.fixture
def muster(tmp_path, monkeypatch):
    (tmp_path / "my_algos.py").write_text(MY_ALGOS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_algos", raising=False)
    return lambda *words: CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_an_own_algorithm_is_exported_shown_and_verified_if_named(muster, monkeypatch):
    made = muster("export", "logreg", "--algorithm", "my_algos:FedMine", "--out", "plan")
    assert "my_algos:FedMine" in made.stdout
    setting, *create = next(shlex.split(line) for line in made.stderr.splitlines() if "task create" in line)
    assert (setting, create[0]) == ("MUSTER_ALGORITHMS=my_algos", "muster")
    with pytest.raises(UntrustedAlgorithm, match="if you trust its code, name it with --algorithm"):
        muster("plan", "verify", "plan")
    assert "ok: " in muster("plan", "verify", "plan", "--algorithm", "my_algos:FedMine").stdout
    open_coordinator_store("sqlite:///muster.db", "muster-blobs").close()
    with pytest.raises(UntrustedAlgorithm, match=setting):
        muster(*create[1:])
    monkeypatch.setenv(*setting.split("="))
    created = json.loads(muster(*create[1:], "--json").stdout)
    assert (created["algorithm"]["name"], created["bundle"]) == ("my_algos:FedMine", "logreg-fedmine")


def test_an_own_algorithm_is_shown_and_simulated(muster):
    assert json.loads(muster("algorithms", "show", "my_algos:FedMine", "--json").stdout)["name"] == "fedmine"
    words = ["--algorithm", "my_algos:FedMine", "--model", "logreg", "--rounds", "1", "--cohort", "2", "--json"]
    assert json.loads(muster("simulate", *words).stdout)["algorithm"] == "fedmine"


@pytest.mark.parametrize(
    "words",
    [
        ("export", "logreg", "--out", "plan", "--algorithm"),
        ("simulate", "--model", "logreg", "--rounds", "1", "--algorithm"),
        ("algorithms", "show"),
    ],
)
def test_an_algorithm_that_breaks_the_contract_is_refused_with_its_line(muster, words, tmp_path):
    says = r"fedroot: report: np.sqrt is no operator.*\(my_algos.py:23: return"
    with pytest.raises(InvalidAlgorithm, match=says):
        muster(*words, "my_algos:FedRoot")
    assert not (tmp_path / "plan").exists()


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
