"""The demo in small: the whole story still holds."""

import json
import re
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedcore.bundle import Bundle
from muster import doctor
from muster.app import app
from muster.cli import EXTRAS
from simulator import read_run
from simulator.errors import FleetError
from simulator.fleet.fork_servers import java_command
from tests.muster.test_cli import muster
from tests.muster.test_tutorials import MY_ALGOS


@pytest.fixture
def forked_services(coordinators, monkeypatch):
    """Coordinator and authority need not be started: the demo that a test of test_cli.py ends starts its own."""

    @contextmanager
    def starting(folder, **how):
        with coordinators.local(folder, **how) as local:
            yield lambda: local

    monkeypatch.setattr("muster.local.server.starting_coordinator", starting)


@pytest.mark.usefixtures("forked_services")
def test_demo_prints_one_object_and_draws_the_curves(tmp_path, typed):
    kept = tmp_path / "kept"
    arguments = ["demo", "--algorithms", "mimelite,fedadam", "--rounds", 3, "--devices", 6, "--out", kept]
    status, out, err = typed(*arguments, "--json")
    assert status == 0, err
    assert err.startswith("load libraries\nmimelite 0 of 3\n")
    assert "fedadam 3 of 3, accuracy 0." in err
    result = json.loads(out)
    assert set(result["algorithms"]) == {"mimelite", "fedadam"}
    for facts in result["algorithms"].values():
        assert facts["rounds"] == 3
        assert 0 < facts["test_accuracy"] <= 1
        assert facts["bytes_up_per_device"] > 4 * 3818
        assert facts["bytes_down_per_device"] > 4 * 3818
    # MimeLite sends a delta and a gradient, FedAdam a delta. How many reports a device sends is up to chance.
    sent = {name: facts["report"]["sent"] for name, facts in result["algorithms"].items()}
    assert sent["mimelite"] > 1.9 * sent["fedadam"]
    assert result["agreement"] < 1e-5
    assert result["secure_aggregation"] is False
    app = result["app"]
    best = max(result["algorithms"].values(), key=lambda run: run["test_accuracy"])
    assert (app["algorithm"], app["devices"], app["name"], app["version"]) == (best["algorithm"], 15, "digits", 1)
    assert app["low"] <= app["accuracy"] <= app["high"]
    assert abs(app["accuracy"] - best["test_accuracy"]) < 0.05  # a mean over devices, and one over examples
    assert [(one["digit"], len(one["levels"])) for one in app["digits"]] == [(digit, 8) for digit in range(10)]
    steps = result["round_steps"]
    assert {name for name in steps if steps[name] > 0} == {"selection", "reporting", "update", "commit"}
    svg = "{http://www.w3.org/2000/svg}"
    drawn = ElementTree.parse(kept / "learning-curves.svg")
    assert {"mimelite", "fedadam"} <= {text.text for text in drawn.iter(f"{svg}text")}
    lines = [path.get("d").split() for path in drawn.iter(f"{svg}path") if "line reactive" in path.get("class")]
    assert [len(places) // 2 for places in lines] == [3, 3]  # x and y of each round
    for name, facts in result["algorithms"].items():
        run = read_run(kept / name)
        assert [point["test.accuracy"] for point in run.points] == [one["test.accuracy"] for one in facts["points"]]
        assert run.result.test_accuracy == facts["test_accuracy"]
        assert run.result.curve == facts["points"]
        tensors = load_file(kept / name / "model.safetensors")
        assert sum(tensor.size for tensor in tensors.values()) == 3818
        assert Bundle(run.config.plan).manifest.algorithm.settings == run.config.settings
    status, out, err = typed(*arguments)
    assert (status, out) == (2, "")
    assert "kept exists already; take another folder" in err
    (tmp_path / "file").touch()
    status, _, err = typed(*arguments[:-1], tmp_path / "file" / "kept")
    assert (status, err) == (
        1,
        f"error: the run in {tmp_path}/file/kept cannot be kept: Not a directory: {tmp_path}/file/kept\n",
    )


@pytest.mark.usefixtures("forked_services")
def test_demo_masks_and_agrees(typed):
    status, out, err = typed("demo", "--algorithms", "fedavg", "--rounds", 2, "--devices", 8, "--json")
    assert status == 0, err
    result = json.loads(out)
    assert result["secure_aggregation"] is True
    assert result["round_steps"]["unmasking"] > 0
    assert result["algorithms"]["fedavg"]["phases"]["mask"] > 0
    assert 1e-6 < result["agreement"] < 5e-3


@pytest.mark.long
@pytest.mark.usefixtures("forked_services")
def test_demo_trains_on_a_jvm(typed):
    try:
        java_command()
    except FleetError as error:
        pytest.skip(str(error))
    words = ["demo", "--runtime", "jvm", "--algorithms", "fedavg", "--rounds", 2, "--devices", 8, "--json"]
    status, out, err = typed(*words)
    assert status == 0, err
    result = json.loads(out)
    assert result["secure_aggregation"] is True
    assert 1e-5 < result["agreement"] < 1e-2
    assert len(result["app"]["digits"]) == 10


@pytest.mark.long
def test_demo_runs_an_own_algorithm_in_clear_and_prints_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_algos.py").write_text(MY_ALGOS)
    arguments = ["--algorithms", "my_algos:FedMine", "--rounds", 1, "--devices", 8, "--plain"]
    status, out, err = muster("demo", *arguments)
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80 + len("my_algos")  # names of built-in algorithms are shorter
    assert re.search(r"^my_algos:FedMine on 15 held-out devices: accuracy 0\.\d+ \(95 %: ", out, re.MULTILINE)
    assert len(re.findall(r"\ba \d", out)) == 10
    assert "every report in the clear" in err
    assert "my_algos:FedMine  1 " in out


@pytest.mark.long
def test_a_page_and_devices_on_node_train_in_a_secure_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", "--browser", "--rounds", "1", "--devices", "8", "--out", "kept", "--json"])
    if isinstance(done.exception, FleetError):
        pytest.skip(str(done.exception))
    assert done.exit_code == 0, done.exception
    result = json.loads(done.stdout)
    assert (result["rounds"], result["devices"], result["counted"]) == (1, 7, 1)
    assert result["page"] == "Done: round 1, 6 examples, masked: only the sum over many devices can be read."
    assert (tmp_path / "kept" / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--plain"], "its rounds are secure"),
        (["--devices", "7"], "its rounds are secure"),
        (["--runtime", "jvm"], "leave this out"),
    ],
)
def test_a_demo_in_a_browser_that_could_not_be_is_refused(wrong, words):
    done = CliRunner().invoke(app, ["demo", "--browser", *wrong])
    assert (done.exit_code, words in done.stderr) == (2, True)


CODE = """
import sys
from muster.app import app
app(["doctor", "--json"], standalone_mode=False)
print(sorted({"torch", "onnxruntime", "onnx", "fastapi", "pygal"} & sys.modules.keys()))
"""


def findings():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    facts = json.loads(result.stdout)
    return result.exit_code, facts["core_works"], {one["name"]: one for one in facts["findings"]}


def test_full_installation_runs_the_demo_and_lists_versions():
    code, works, found = findings()
    assert (code, works) == (0, True)
    for name in ("numpy", "torch", "onnxruntime", "fastapi"):
        assert found[name]["found"] == metadata.version(name)
    assert found["cores"]["found"].isdecimal()


def test_the_doctor_looks_at_every_extra_but_that_of_developers():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {"", *project["optional-dependencies"]} - {"dev"} == set(doctor.EXTRAS)


def test_what_the_demo_lacks_fails_and_names_the_extra(monkeypatch):
    def version(name, real=metadata.version):
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    code, works, found = findings()
    assert (code, works) == (1, False)
    assert (found["torch"]["found"], found["torch"]["get"]) == (None, "pip install 'muster-fl[export]'")
    assert "muster demo lacks torch" in CliRunner().invoke(app, ["doctor"]).stdout


def test_what_only_more_than_the_demo_needs_is_said_and_does_not_fail(monkeypatch, tmp_path):
    for name in ("PATH", "MUSTER_EXECUTORCH", "MUSTER_SYSROOT"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(doctor, "POSTGRES", tmp_path)
    code, works, found = findings()
    assert (code, works) == (0, True)
    for name in ("g++", "aarch64-linux-gnu-g++", "qemu-aarch64", "sysroot", "PostgreSQL", "CUDA device"):
        assert found[name]["found"] is None
        assert found[name]["get"]
    assert found["ExecuTorch library, aarch64"]["get"] == "muster device build-executorch --arch aarch64"


def test_the_doctor_loads_no_engine():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_missing_module_names_an_extra_that_brings_it():
    def plain(name):
        return name.lower().replace("_", "-")

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    brings = {extra: {plain(doctor.NAME.match(line)[0]) for line in lines} for extra, lines in extras}
    brings["coordinator"] |= {"pydantic", "starlette"}  # through fastapi
    distributions = metadata.packages_distributions()
    for module, extra in EXTRAS.items():
        assert brings[extra] & set(map(plain, distributions[module])), module
