"""A shell in which `muster` and `python` start at once: they are forked from a process that has loaded the libraries.

Each command is a process of its own, with the arguments, folder, environment and files that the shell gives it. Only
the import of the libraries, which is most of the time of a short command, happens once.
"""

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

from muster.cli import main

ROOT = Path(__file__).parents[2]
OWN = "export.build export.build simulator.runs.running simulator.fleet.fleet coordinator.server muster.app"
LAZY = (
    "torch._dynamo torch._inductor.output_code torch.export._trace sympy.combinatorics sympy.tensor.tensor "
    "export.onnx onnx device_runtime.backends.onnxruntime networkx "  # an export and its check
    "pygal scipy.stats dp_accounting"
)
"""What a command imports only once it exports, draws or accounts: seconds, which each would pay again."""
NAMES = ("muster", "python")
CLIENT = """#!/bin/sh
"exec" "{python}" "-IS" "$0" "$@"
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
said = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(said).to_bytes(4, "big")], [0, 1, 2])
server.sendall(said)
process = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(process, number))
sys.exit(int.from_bytes(server.recv(1, socket.MSG_WAITALL) or b"\\x01", "big"))
"""


@contextmanager
def warm_commands(folder):
    """A folder with the commands, for the PATH of a shell; they end with the block."""
    address = str(folder / "commands.socket")
    program = "from tests.muster.warm_commands import serve; import sys; serve(sys.argv[1])"
    server = subprocess.Popen([sys.executable, "-c", program, address], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        for name in NAMES:
            path = folder / name
            path.write_text(CLIENT.format(python=sys.executable, address=address, name=name))
            path.chmod(0o755)
        assert server.stdout.readline() == b"ready\n"
        yield folder
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


def serve(address):
    """Fork a process for every command that comes to the socket at `address`."""
    for name in f"{OWN} {LAZY}".split():
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _attend(client)
        client.close()


def _attend(client):
    """Run a client's command and tell it the exit code; end the command when the client is gone."""
    length, files, _, _ = socket.recv_fds(client, 4, 3)
    said = client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    name, arguments, folder, environment = json.loads(said)
    process = os.fork()
    if process == 0:
        client.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os._exit(run_as(name, arguments))
    for file in files:
        os.close(file)
    client.sendall(process.to_bytes(4, "big"))
    ended = os.pidfd_open(process)
    if client in select.select([client, ended], [], [])[0]:
        os.kill(process, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with_signal = status if status >= 0 else 128 - status
    try:
        client.sendall(with_signal.to_bytes(1, "big"))
    finally:
        os._exit(0)


def run_as(name, arguments):
    """The exit code of a command in this process, which is `muster` or Python."""
    try:
        if name == "muster":
            sys.argv = ["muster", *arguments]
            main()
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
