"""`muster doctor` tells the truth about this installation, and how to get what it lacks."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from typer.testing import CliRunner

from muster import doctor
from muster.app import app
from muster.cli import EXTRAS

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
