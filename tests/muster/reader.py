"""A reader of a document, who does as it says: saves its files, and types its commands in an empty folder.

* A block of `sh` is typed into a shell. What one block sets or where it goes, the next one finds.
* A block whose command serves, such as `muster coordinator serve`, is a terminal of its own. The reader goes on when
  its ports answer, and ends it at the end of the document.
* A block of another language that begins with `# name.ext` is a file of that name.
* `TASK` in a command is the id that the last `muster task create` printed.
* The ports 8080 and 8081 are others here, so that several readers can be at work.
"""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import time

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.]+\.\w+)\n")
SERVES = re.compile(r"^muster \w+ serve\b", re.MULTILINE)
INSTALLS = re.compile(r"^(python3 -m venv|\. \S+/activate|pip install) .*\n|^\. \S+/activate\n", re.MULTILINE)
CREATES = re.compile(r"^(?:\w+=\S+ )*muster task create\b(?:.*\\\n)*.*\n", re.MULTILINE)
CREATED = re.compile(r"^task +(\S+)$", re.MULTILINE)


class Reader:
    """A reader in `folder`. environment: of the shell, whose PATH has the commands. installs: whether to install."""

    def __init__(self, folder, environment, *, installs=False):
        self._folder, self._installs = folder, installs
        self._ports = {"8080": str(free_port()), "8081": str(free_port())}
        self._environment = environment | {
            "MUSTER_PORT": self._ports["8080"],
            "MUSTER_ADMIN_PORT": self._ports["8081"],
            "COLUMNS": "200",
        }
        self._state = folder.with_name(f"{folder.name}.state")
        self._task = "TASK"
        self._served = []
        self.output = ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self._served:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._served:
            process.communicate(timeout=60)

    def follow(self, text):
        """Do as a document says. Raises AssertionError with what a command printed when it fails."""
        for language, block in BLOCK.findall(text):
            named = FILE.match(block)
            if language == "sh":
                for commands in parts(block if self._installs else INSTALLS.sub("", block)):
                    self._type(commands)
            elif named:
                (self._folder / named[1]).write_text(block)

    def _type(self, commands):
        commands = self._made_ours(commands)
        shell = ["bash", "-euo", "pipefail", "-c"]
        kept = f'{{ export -p; printf "cd %q\\n" "$PWD"; }} > {self._state}'
        before = f"if [ -f {self._state} ]; then . {self._state}; fi\n"
        if SERVES.search(commands):
            options = {"cwd": self._folder, "env": self._environment, "start_new_session": True}
            with (self._folder.with_name(f"{self._folder.name}.served")).open("ab") as log:
                started = subprocess.Popen([*shell, before + commands], stdout=log, stderr=log, **options)
            self._served.append(started)
            for port in self._ports.values():
                until_answered(int(port), started)
            return
        done = subprocess.run(
            [*shell, f"{before}{commands}\n{kept}"],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{commands}{done.stdout}{done.stderr}"
        self.output += done.stdout
        for created in CREATED.findall(done.stdout):
            self._task = created

    def _made_ours(self, commands):
        for theirs, ours in self._ports.items():
            commands = commands.replace(f":{theirs}", f":{ours}")
        return re.sub(r"\bTASK\b", self._task, commands)


def parts(commands):
    """The commands in parts, each of which ends where a task is created, whose id the next part may name."""
    ends = [found.end() for found in CREATES.finditer(commands)]
    edges = [0, *ends, len(commands)]
    return [commands[start:end] for start, end in itertools.pairwise(edges) if commands[start:end].strip()]


def free_port():
    """A port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until_answered(port, process):
    """Wait until somebody listens at a port, as long as the process that should is there."""
    while True:
        assert process.poll() is None, "the service ended"
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
