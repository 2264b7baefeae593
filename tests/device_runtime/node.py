"""The device runtime in TypeScript, as processes of Node."""

import functools
import json
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest

from simulator.errors import FleetError
from simulator.fleet.fork_servers import JS_FOLDER, program

IS_NEW = JS_FOLDER / "node-is-new.cjs"


@functools.cache
def node():
    """Node's program; a skip where there is none that is new enough, or the packages are not installed."""
    try:
        return program()
    except FleetError as error:
        pytest.skip(str(error))


def command(script, *words):
    """The words that run a script of the package."""
    return [node(), "--no-warnings", str(JS_FOLDER / script), *map(str, words)]


def device_words(folder, url, population, examples, **policy):
    """The words for one session of a device with a folder of its own; `policy` are settings of its owner."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "examples.npz", **examples)
    (folder / "policy.json").write_text(json.dumps(policy))
    given = {
        "coordinator": url, "population": population, "examples": folder / "examples.npz", "state": folder / "state",
        "policy": folder / "policy.json",
    }  # fmt: skip
    return ["run", *(word for name, value in given.items() for word in (f"--{name}", str(value))), "--once", "--json"]


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
