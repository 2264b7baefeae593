import subprocess
import sys

import pytest

SIGTERM_HERE = "os.kill(os.getpid(), signal.SIGTERM)"
PROGRAM = """
import os, signal, time, weakref
from fedcore.private_files import exit_on_sigterm
class Held:
    def __del__(self):
        {destructor}
exit_on_sigterm(7)
try:
    held = Held()
    watched = weakref.ref(held, lambda gone: {callback})
    del held
    {body}
    time.sleep(10)
    print("deaf")
finally:
    print("released")
"""


@pytest.mark.parametrize("place", ["body", "destructor", "callback"])
def test_sigterm_ends_a_process_wherever_it_comes(place):
    program = PROGRAM.format(**{"body": "pass", "destructor": "pass", "callback": None} | {place: SIGTERM_HERE})
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "released\n", "")
