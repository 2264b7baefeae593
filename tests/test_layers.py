"""One direction of imports: as contracts over the source, and as what a fresh interpreter really loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADS = """
import importlib, pkgutil, sys
name, whole = sys.argv[1], sys.argv[2] == "whole"
module = importlib.import_module(name)
for found in pkgutil.walk_packages(module.__path__, name + ".") if whole else ():
    importlib.import_module(found.name)
print(*sorted(m for m in sys.modules if "." not in m))
"""
BLOCKS = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
__import__(sys.argv[1])
"""
WEB = {"fastapi", "starlette", "uvicorn", "pydantic"}
GRAPHS = {"onnx", "onnxruntime"}


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def python(program, *arguments):
    result = run(sys.executable, "-c", program, *arguments)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_import_contracts_are_kept():
    result = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.security("It is needed to export and to simulate, not by coordinators and devices")
@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("fedcore", {"torch", "sqlalchemy"} | WEB | GRAPHS),
        ("secagg", {"torch", "sqlalchemy", "msgspec", "safetensors", "fedcore"} | WEB | GRAPHS),
        ("ingress", {"torch", "sqlalchemy", "secagg", "fastapi", "pydantic", "authority", "coordinator"} | GRAPHS),
        ("authority", {"torch", "sqlalchemy", "coordinator", "device_runtime"} | GRAPHS),
        ("coordinator", {"torch"} | GRAPHS),
        ("coordinator.rules", {"torch", "sqlalchemy", "httpx2", "obstore"} | WEB | GRAPHS),
        ("device_runtime", {"torch", "sqlalchemy", "onnx"} | WEB),
    ],
)
def test_a_package_with_all_its_modules_loads_nothing_that_it_may_not(package, forbidden):
    assert python(LOADS, package, "whole") & forbidden == set()


def test_the_command_line_loads_nothing_heavy_before_a_command_runs():
    heavy = {"torch", "onnx", "onnxruntime", "fastapi", "sqlalchemy", "pygal", "numpy"}
    assert python(LOADS, "muster.app", "alone") & heavy == set()


def test_a_device_runs_its_commands_without_what_the_others_need():
    code = "import sys; sys.modules.update(dict.fromkeys(['typer', 'click', 'rich', 'pydantic'])); "
    code += "from muster.cli import main; main()"

    def muster(*words):
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)

    for words in (["run", "--help"], ["examples", "list", "--help"], ["conditions"]):
        done = muster("device", *words)
        assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    done = muster("doctor")
    assert (done.returncode, done.stderr) == (1, "error: this command needs typer: pip install 'muster-fl[cli]'\n")


def test_the_engine_needs_torch_numpy_and_msgspec_alone():
    blocked = [
        "safetensors",
        "cryptography",
        "httpx2",
        "typer",
        "rich",
        "sqlalchemy",
        "pygal",
        *GRAPHS,
        *WEB,
    ]
    assert python(BLOCKS, "simulator.engine", *blocked) == set()


def test_the_blocker_blocks():
    result = run(sys.executable, "-c", BLOCKS, "fedcore.checkpoint", "safetensors")
    assert "safetensors is blocked" in result.stderr


@pytest.mark.security("ONNX Runtime's own telemetry is turned off before it loads")
@pytest.mark.parametrize("module", ["device_runtime.session", "export.parity"])
def test_the_runtime_collects_no_telemetry_and_starts_no_thread(module, tmp_path):
    threads = "import os; print(len(os.listdir('/proc/self/task')))"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}; {threads}"],
        env={**environment, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert list(tmp_path.rglob("*onnxruntime*")) == []
    if module == "device_runtime.session":
        assert done.stdout.strip() == "1"
