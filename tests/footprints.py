"""A process that has loaded what measures footprints, and forks another for each: an export needs one for each format.

A start takes 0.3 s of CPU, mostly for imports, which is more than the export of a small model. What is forked is
a process of its own, without torch, too.
"""

import json
import os
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

from device_runtime.backends.executorch import FOLDER

PROGRAM = "from tests.footprints import serve; serve()"
ROOT = Path(__file__).parents[1]


class _ForkServer:
    """Measures as `export.parity.measured_alone` does; its process starts with the first footprint."""

    def __init__(self):
        self._process = None

    def measured(self, folder, form):
        if self._process is None:
            command = [sys.executable, "-c", PROGRAM]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
        self._process.stdin.write(json.dumps([str(folder), form, os.environ.get(FOLDER)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        out, err = ((folder / name).read_bytes() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([], code, out, err)

    def close(self):
        if self._process is not None:
            self._process.communicate()


@contextmanager
def footprint_fork_server():
    """What measures footprints for as long as the block runs."""
    server = _ForkServer()
    try:
        yield server.measured
    finally:
        server.close()


def serve():
    """Measure in a forked process what each line of standard input names, and say its exit code."""
    import device_runtime.backends.onnxruntime
    import device_runtime.capabilities

    for line in sys.stdin:
        folder, form, libraries = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
            if libraries is not None:
                os.environ[FOLDER] = libraries
            sys.argv = ["footprint", folder, form]
            os._exit(_code_of(device_runtime.capabilities.main))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _code_of(main):
    """The exit code of a function that is a whole program."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
