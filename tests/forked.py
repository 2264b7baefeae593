"""Processes of Python that are forked from one that has loaded their libraries: a start takes half a second of CPU.

Each is a process of its own, and a child of the test's, with the arguments, folder, environment and files that it is
given. Only the imports, which are most of the time of a short command, happen once.
"""

import atexit
import ctypes
import functools
import gc
import json
import os
import socket
import subprocess
import sys
import threading

from tests.muster.warm_commands import run_as
from tests.tree import ROOT

PROGRAM = "from tests.forked import serve; import sys; serve(int(sys.argv[1]), sys.argv[2:])"
DEVICE = (
    "device_runtime.protocol.secure device_runtime.backends.onnxruntime device_runtime.examples.source encodings.idna "
    "device_runtime.conditions device_runtime.sandbox device_runtime.models.model muster.commands.device"
)
"""What the process of a device loads."""
COMMAND = f"{DEVICE} coordinator.server coordinator.store.tasks muster.app muster.output"
"""What commands load that neither export nor train."""
FLEET = f"{DEVICE} simulator.fleet.faults simulator.fleet.faults"
"""What the process loads from which emulated devices are forked."""
SET_CHILD_SUBREAPER = 36  # of prctl
ONE_AT_A_TIME = threading.Lock()


class ForkServer:
    """Forks processes; the server starts with the first of them."""

    def __init__(self, modules):
        self._modules = modules.split()
        self._process = None

    def start(self, words, **how):
        """As subprocess.Popen, for `[sys.executable, "-m" or "-c", ...]`; with `preexec_fn` it is started."""
        return _Forked(self, words, **how)

    def run(self, words, **how):
        """As subprocess.run, which keeps standard output and errors as text, and ends after a minute."""
        with self.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as process:
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def fork(self, order, files):
        """The id of a new child of this process, with these files as standard input, output and errors."""
        if self._process is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *self._modules]
                self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        adopt = ctypes.CDLL(None).prctl
        with ONE_AT_A_TIME:
            adopt(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what is forked becomes a child of this process
            try:
                socket.send_fds(self._socket, [len(order).to_bytes(4, "big")], files)
                self._socket.sendall(order)
                return int.from_bytes(self._socket.recv(4, socket.MSG_WAITALL), "big")
            finally:
                adopt(SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self):
        if self._process is not None:
            self._socket.close()
            self._process.wait()


@functools.cache
def forked(modules):
    """What forks processes that have loaded `modules`, for as long as this process runs."""
    server = ForkServer(modules)
    atexit.register(server.close)
    return server


def start_fleet(words, **how):
    """As subprocess.Popen, which starts a fork server of emulated devices; those in Python are forked."""
    return forked(FLEET).start(words, **how) if words[0] == sys.executable else subprocess.Popen(words, **how)


class _Forked(subprocess.Popen):
    """A process that is forked where another would be started."""

    def __init__(self, server, words, **how):
        self._server = server
        super().__init__(words, **how)

    def _execute_child(self, args, executable, preexec_fn, *rest):
        if preexec_fn is not None:
            super()._execute_child(args, executable, preexec_fn, *rest)
            return
        assert args[0] == sys.executable
        _, _, folder, environment, *_ = rest
        ends = rest[7:13]  # of the pipes of standard input, output and errors: first what is read, then what is written
        files = [own if given == -1 else given for own, given in enumerate((ends[0], ends[3], ends[5]))]
        given = dict(os.environ if environment is None else environment)
        order = [list(map(str, args[1:])), str(folder or os.getcwd()), given]
        self.pid = self._server.fork(json.dumps(order).encode(), files)
        self._child_created = True
        self._close_pipe_fds(*ends)


def serve(number, modules):
    """Fork a process for every order that comes through the socket with this number."""
    for name in modules:
        __import__(name)
    gc.collect()
    gc.freeze()  # what is loaded stays: no collector looks through its pages, which would copy them
    orders = socket.socket(fileno=number)
    while True:
        length, files, _, _ = socket.recv_fds(orders, 4, 3)
        if not length:
            return
        words, folder, environment = json.loads(orders.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            process = os.fork()
            if process == 0:
                for end in (orders.fileno(), told, tell):
                    os.close(end)
                _become(words, folder, environment, files)
            os.write(tell, process.to_bytes(4, "big"))
            os._exit(0)  # now the process is a child of the one that asked for it
        os.waitpid(between, 0)
        orders.sendall(os.read(told, 4))
        for end in (told, tell, *files):
            os.close(end)


def _become(words, folder, environment, files):
    """Run a program in this process, and end it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    os._exit(run_as("python", words))
