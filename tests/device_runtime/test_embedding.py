"""What embedders are shown, and what importing the runtime loads."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.store.tasks import TaskSettings
from device_runtime import Device
from device_runtime.errors import ConfigError
from device_runtime.examples import ExampleStore
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from muster.commands.device import parser, run
from tests.device_runtime import linear
from tests.device_runtime.personal import taken, trainable
from tests.device_runtime.released import KEY, POLICY, ROWS, released

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_host_app_trains_on_what_it_recorded(coordinators, tmp_path):
    bundle = export_bundle(Model(load("logreg")), create("fedavg", {"batch_size": 5}), tmp_path / "plan")
    with coordinators.local(tmp_path) as local:
        task = local.store.register_task(
            bundle, TaskSettings(population="digits", goal=1, rounds=2, over_selection=1.0)
        ).id
        command = [sys.executable, EXAMPLES / "host_app.py", "--coordinator", local.url, "--population", "digits"]
        runs = [
            subprocess.run([*command, "--folder", tmp_path / "app"], capture_output=True, text=True, check=False)
            for _ in range(2)
        ]
        rounds = local.store.rounds(task)
    assert [(run.returncode, run.stdout.split()) for run in runs] == [(0, ["reported"])] * 2, runs
    assert "its policy names no signers" in runs[0].stderr
    assert [attempt.metrics["train.loss"] > 0 for attempt in rounds] == [True, True]
    assert ExampleStore.open(tmp_path / "app" / "examples").counts() == {"default": 40}


def programs(language):
    text = (EXAMPLES.parent / "docs" / "device.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_programs_in_the_documents_run(coordinator, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keep, embed, predict, personalise = programs("python")
    known = {"image": np.zeros((28, 28), np.float32), "images": ROWS}
    known["several"] = [{"x": known["image"], "y": label} for label in range(3)]
    exec(compile(keep, "device.md", "exec"), known)
    assert ExampleStore.open(tmp_path / "typed").counts() == {"digits": 4}
    embed = embed.replace("https://fl.example.org", coordinator.url).replace("keyboard-en", "phones")
    embed = re.sub('ed25519:[^"]*', KEY.signer, embed)
    exec(compile(embed, "device.md", "exec"), known)
    assert (known["outcome"].outcome, known["outcome"].reason) == ("aborted", "plan-refused")
    released(coordinator, 3)
    exec(compile(predict, "device.md", "exec"), known)
    assert known["outputs"].tolist() == [3.0] * 3
    trainable(coordinator, 4)
    np.savez(config.examples, **linear.examples(80))
    with taken(replace(config, policy=POLICY)) as model:
        exec(compile(personalise, "device.md", "exec"), {"model": model})
        assert model.personal
    assert coordinator.checkins[0].examples == {"digits": 4}


def unit(name):
    parser = configparser.RawConfigParser(strict=False, inline_comment_prefixes=None)
    parser.optionxform = str
    parser.read(EXAMPLES / "systemd" / name)
    return parser


def test_the_service_runs_a_command_that_exists_with_its_options():
    words = shlex.split(unit("muster-device.service")["Service"]["ExecStart"])
    assert words[1:3] == ["device", "run"]
    given = parser().parse_args(words[2:])
    assert (given.act, given.once, str(given.policy)) == (run, True, "/etc/muster/policy.toml")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_understands_every_line_of_the_units(tmp_path):
    for path in (EXAMPLES / "systemd").iterdir():
        text = path.read_text().replace("/opt/muster/bin/muster", shutil.which("true") or "/bin/true")
        (tmp_path / path.name).write_text(text)
    units = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(
        ["systemd-analyze", "verify", *units],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LANG": "C"},
    )
    said = [line for line in done.stderr.splitlines() if "muster-" in line]
    assert (done.returncode, said) == (0, []), done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"coordinator": "foo"},
        {"coordinator": "http://"},
        {"coordinator": "http://127.0.0.1:99999"},
        {"coordinator": 5},
        {"population": 5},
        {"population": ""},
        {"population": "\ud800"},
        {"backend": "nope"},
        {"state": "sw\0"},
        {"examples": None},
        {"wait_s": -40},
        {"wait_s": float("nan")},
        {"wait_s": "soon"},
        {"labels": {"labels in Europe": "eu"}},
        {"labels": {"labels": 3}},
    ],
    ids=ascii,
)
def test_a_device_that_could_never_work_is_not_made(wrong, tmp_path):
    good = {"coordinator": "http://127.0.0.1:9", "population": "p", "examples": "e", "state": tmp_path}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Device(**good | wrong)
    Device(**good)


MODULES = (
    "session",
    "runner",
    "protocol.transport",
    "state.folder",
    "examples",
    "device",
    "permission.guard",
    "permission.policy",
    "backends.onnxruntime",
)
FOREIGN = "torch", "httpx2", "fastapi", "sqlalchemy", "pydantic", "onnx", "coordinator", "export", "simulator"


HEAVY = "numpy", "msgspec", "onnxruntime", "cryptography", "sqlite3"


def test_the_package_alone_loads_nothing_and_then_what_is_asked_for():
    code = f"""
import sys, device_runtime
loaded = lambda: [name for name in {HEAVY} if name in sys.modules]
print(loaded())
for name in device_runtime.__all__:
    assert getattr(device_runtime, name).__name__ == name
print(loaded())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The runtime comes with the first session.
    assert done.stdout.splitlines() == ["[]", "['numpy', 'msgspec', 'cryptography', 'sqlite3']"]


def test_a_device_loads_no_tensor_library_and_no_server():
    code = "import sys\n" + "".join(f"import device_runtime.{name}\n" for name in MODULES)
    code += f"print([name for name in {FOREIGN} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""
