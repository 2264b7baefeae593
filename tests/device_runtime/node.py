"""The device runtime in TypeScript, as processes of Node."""

import functools
import json
import shutil
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest

from tests.tree import ROOT

FOLDER = ROOT / "device_runtime" / "js"
IS_NEW = FOLDER / "node-is-new.cjs"


@functools.cache
def node():
    """Node's program; a skip where there is none that is new enough, or the packages are not installed."""
    program = shutil.which("node")
    if program is None or subprocess.run([program, str(IS_NEW)], check=False).returncode != 0:
        pytest.skip("no Node 22.18 or newer")
    if not (FOLDER / "node_modules" / ".package-lock.json").exists():
        pytest.skip("`make js` installs what the device runtime in TypeScript needs")
    return program


def command(script, *words):
    """The words that run a script of the package."""
    return [node(), "--no-warnings", str(FOLDER / script), *map(str, words)]


def device_words(folder, url, population, examples, **policy):
    """The words of a device with a folder of its own; `policy` are settings of its owner."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "examples.npz", **examples)
    (folder / "policy.json").write_text(json.dumps(policy))
    given = {
        "coordinator": url, "population": population, "examples": folder / "examples.npz", "state": folder / "state",
        "policy": folder / "policy.json",
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@contextmanager
def sessions():
    """A process of Node that runs sessions, which costs less than one for each; gives what runs one by its words."""
    process = subprocess.Popen(command("tests/sessions.ts"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(words):
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    with process:
        yield run
        process.stdin.close()
