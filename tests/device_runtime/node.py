"""The device runtime in TypeScript, as processes of Node."""

import functools
import shutil
import subprocess

import pytest

from tests.tree import ROOT

FOLDER = ROOT / "device_runtime" / "js"
OLDEST = 22


@functools.cache
def node():
    """Node's program; a skip where there is none that is new enough, or the packages are not installed."""
    program = shutil.which("node")
    version = program and subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    if not version or int(version.removeprefix("v").split(".")[0]) < OLDEST:
        pytest.skip(f"no Node {OLDEST} or newer")
    if not (FOLDER / "node_modules" / ".package-lock.json").exists():
        pytest.skip("`make js` installs what the device runtime in TypeScript needs")
    return program


def command(script, *words):
    """The words that run a script of `src/node`."""
    return [node(), "--no-warnings", str(FOLDER / "src" / "node" / script), *map(str, words)]
