"""The program of a device under test, as a command line with places to fill in."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from simulator.fleet import fork_servers
from tests.device_runtime import linear
from tests.device_runtime.pages import build

PATIENCE_S = 120
PLACES = (
    "--coordinator {coordinator} --population {population} --examples {examples} --state {state} "
    "--enrolment-secret-file {secret} --label app_version=3.2.1 --label region=eu"
)
SECRET = b"only devices and who enrols them know this"


def known(name, page=fork_servers.JS_FOLDER / "dist" / "page"):
    """The command line of a device that this repository has, by name; any other text is one. Raises FleetError.

    page: a folder, into which that of a browser is built.
    """
    if name == "python":
        return (
            shlex.join([sys.executable, "-m", "muster", "device", "run"])
            + f" {PLACES} --policy {{policy_toml}} --once --json"
        )
    if name == "node":
        return (
            shlex.join(
                [fork_servers.program(), "--no-warnings", str(fork_servers.JS_FOLDER / "src" / "node" / "main.ts")]
            )
            + f" run {PLACES} --policy {{policy_json}} --once --json"
        )
    if name == "jvm":
        words = shlex.join(fork_servers.java_command("run"))
        return words + f" {PLACES} --policy {{policy_json}} --once --json"
    if name == "browser":
        words = [sys.executable, "-m", "tests.conformance.browser", "--page", str(build(page))]
        return shlex.join(words) + f" {PLACES} --policy {{policy_json}}"
    return name


def started(words):
    """What a program that is started printed, once it has ended."""
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


class Device:
    """One device: its command line, a folder with its examples, policy, secret and state, and how it is run."""

    def __init__(self, command_line, folder, url, run=started):
        self._command_line, self._folder, self._url, self._run = command_line, folder, url, run
        (folder / "secret").write_bytes(SECRET + b"\n")
        self.hold(linear.examples(10))

    def hold(self, examples):
        """Have other examples from now on."""
        np.savez(self._folder / "examples.npz", **examples)

    def session(self, **policy):
        """The outcome of one session, under an owner's policy: the last line that the program prints, a JSON object."""
        ended = self._run(self._words(policy))
        lines = ended.stdout.strip().splitlines()
        assert lines, f"no outcome on standard output, but on standard error: {ended.stderr[-500:]}"
        return json.loads(lines[-1])

    def killed_when(self, is_there, **policy):
        """Start a session, and kill the program and all that it started as soon as something is there."""
        nowhere = subprocess.DEVNULL
        with subprocess.Popen(self._words(policy), stdout=nowhere, stderr=nowhere, start_new_session=True) as process:
            try:
                assert is_there.wait(PATIENCE_S), "what the device was to be killed at never came"
            finally:
                while living := processes_of(process.pid):
                    for pid in living:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    def _words(self, policy):
        (self._folder / "policy.json").write_text(json.dumps(policy))
        (self._folder / "policy.toml").write_text(as_toml(policy))
        places = {
            "examples": "examples.npz",
            "state": "state",
            "policy_json": "policy.json",
            "policy_toml": "policy.toml",
            "secret": "secret",
        }
        filled = {name: str(self._folder / file) for name, file in places.items()}
        filled |= {"coordinator": self._url, "population": "phones"}
        return [word.format(**filled) for word in shlex.split(self._command_line)]


def processes_of(session):
    """The processes of a session of the operating system that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, of_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state not in {"Z", "X"}:
                found.append(int(path.parent.name))
    return found


def as_toml(policy):
    """Settings in TOML: texts, numbers and lists are written there as in JSON."""
    tables = {name: value for name, value in policy.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in policy.items() if name not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines)
