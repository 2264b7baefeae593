"""Commands on a terminal of a certain width, and in a pipe."""

import fcntl
import os
import pty
import struct
import sys
import termios

from tests.forked import COMMAND, forked


def on_terminal(columns, *arguments, program=("-m", "muster")):
    """Exit code and output of a command whose output is a terminal so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, *program, *map(str, arguments)]
    process = forked(COMMAND).start(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end was closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    return process.wait(), b"".join(parts).decode().replace("\r\n", "\n")
