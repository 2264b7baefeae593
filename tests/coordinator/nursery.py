"""One process that has loaded the coordinator and forks replicas: that takes a hundredth of the time of a start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from coordinator.server import serve
from coordinator.settings import Settings

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    ready, given, environment = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.environ |= environment
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve(Settings(**given), lambda ready_at: Path(ready).write_text(ready_at.devices))
        os._exit(0)
    print(pid, flush=True)
"""


class Nursery:
    """Starts processes; whoever starts one also ends it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, ready: Path, settings: dict[str, object], environment: dict[str, str]) -> int:
        """A coordinator, which writes its URL into `ready` once it answers; its process id."""
        self._process.stdin.write(json.dumps([str(ready), settings, environment]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def open_nursery() -> Iterator[Nursery]:
    """A nursery for as long as the block runs."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Nursery(process)
        process.stdin.close()
