"""Code that took over a sandbox's process reaches no file and no process of its user's."""

import ast
import errno
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from device_runtime.backends import FORMATS, open_backend
from device_runtime.capabilities import random_job
from device_runtime.errors import ConfigError, DeadlinePassed, RuntimeFailed
from device_runtime.sandbox import channel, kernel, process
from device_runtime.sandbox.process import Sandbox
from device_runtime.trainer import InProcess, Limits
from export.build import build_plan
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from tests.device_runtime import hostile
from tests.device_runtime.test_sandbox import WIDE, busy, children, job
from tests.sampled import covering

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the attacks are those on Linux")
WHOLE = pytest.mark.skipif(bool(channel.lacking()), reason=f"this kernel lacks {channel.lacking()}")
LANDLOCK = pytest.mark.skipif(
    kernel.landlock_version() < kernel.WHOLE_LANDLOCK, reason=f"this kernel has {kernel.landlock_version()}"
)
SECCOMP = pytest.mark.skipif(
    not kernel.seccomp_offered(), reason="this kernel takes no filter, or there is none for it"
)
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the calls of other processors are those on x86-64")
REFUSED = {"EPERM", "EACCES"}
TAKEN_OVER = """
from device_runtime.backends import BACKENDS
from device_runtime.sandbox import child, kernel
from tests.device_runtime.hostile import Hostile, Victim
{fewer_defences}
BACKENDS["onnxruntime"] = lambda **_: Hostile({attacks!r}, {folder!r}, {victim!r}, {refused!r})
child.main()
"""
WITHOUT_LANDLOCK = "kernel.landlock_version = lambda: 0"
LIMITS_ALONE = f"{WITHOUT_LANDLOCK}; kernel.seccomp_offered = lambda: False"
LANDLOCK_ALONE = """
import os, sys
from device_runtime.sandbox import kernel
from tests.device_runtime.hostile import Victim, outcome
folder, pid, address, *attacks = sys.argv[1:]
for attack in attacks:
    if not os.fork():
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.restrict_paths()
        print(attack, outcome(attack, folder, Victim(int(pid), int(address))), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def folder(tmp_path):
    """A device's state, with its examples and its policy."""
    folder = tmp_path / "state"
    (folder / "elsewhere").mkdir(parents=True)
    for name in ("state.db", "sealing-key", "examples.npz", "policy.toml"):
        (folder / name).write_bytes(f"what is in {name}".encode())
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def victim():
    """Another process of this user's."""
    command = [sys.executable, "-c", hostile.VICTIM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        yield hostile.Victim(running.pid, int(running.stdout.readline()))
        assert running.poll() is None
        running.stdin.close()


@pytest.fixture
def sandbox_of(monkeypatch, tmp_path):
    """Makes sandboxes whose process runs the given code in the place of its own."""

    def make(code):
        (tmp_path / "taken.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(process, "CHILD", "taken")
        return Sandbox("onnxruntime")

    return make


def files(folder):
    """What can be told of the files in a folder."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        known = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[path] = known.st_mode, known.st_uid, known.st_mtime_ns, known.st_nlink, content
    return found


def python(code, *arguments):
    """What a fresh Python prints."""
    return subprocess.check_output([sys.executable, "-c", code, *map(str, arguments)], text=True)


def carried_out(sandbox_of, folder, victim, attacks, refused=REFUSED, fewer_defences=""):
    """The attacks from a sandbox that the system does not refuse, with what became of each."""
    given = {"attacks": attacks, "folder": str(folder), "victim": victim, "refused": refused}
    with pytest.raises(RuntimeFailed) as said:
        sandbox_of(TAKEN_OVER.format(**given, fewer_defences=fewer_defences)).train(job(), WIDE, lambda: True)
    made, *others = ast.literal_eval(str(said.value).rpartition("attacked: ")[2])
    assert made == len(attacks)
    return others


@pytest.mark.security("On Linux that process reaches no path and no other process either")
@pytest.mark.security("A process of its own with limits on memory and time … and ends with its device")
@WHOLE
def test_hostile_code_in_a_sandbox_reaches_no_file_and_no_process(folder, victim, sandbox_of):
    before = files(folder)
    assert carried_out(sandbox_of, folder, victim, hostile.NAMES) == []
    assert files(folder) == before


HOARDING = """
from device_runtime.backends import BACKENDS
from device_runtime.errors import RuntimeFailed
from device_runtime.sandbox import child
from tests.device_runtime.hostile import hoard

class Hoarder:
    format, runtime = "onnx", "hostile"

    def load(self, graph, name):
        raise RuntimeFailed("hoarded", str(hoard({way!r}, {most!r})))

BACKENDS["onnxruntime"] = lambda **_: Hoarder()
child.main()
"""


@pytest.mark.security("run in a process of their own … no key of the device … no file and no connection")
@pytest.mark.security("A process of its own with limits on memory and time … and ends with its device")
@WHOLE
@pytest.mark.parametrize("way", hostile.HOARDS)
def test_hostile_code_gets_no_more_memory_than_was_allowed(way, sandbox_of):
    allowed = 400_000_000
    with pytest.raises(RuntimeFailed) as said:
        sandbox_of(HOARDING.format(way=way, most=2 * allowed)).train(job(), Limits(allowed, 60.0), lambda: True)
    assert allowed / 4 < int(str(said.value).rpartition(": ")[2]) < allowed


@pytest.mark.security("Landlock: nothing more, as the filter refuses all that Landlock would")
@SECCOMP
def test_the_filter_alone_refuses_every_attack(folder, victim, sandbox_of):
    before = files(folder)
    assert carried_out(sandbox_of, folder, victim, hostile.NAMES, fewer_defences=WITHOUT_LANDLOCK) == []
    assert files(folder) == before


@pytest.mark.security("run in a process of their own … no key of the device … no file and no connection")
@pytest.mark.security("It opens no file and no connection")
def test_a_sandbox_of_limits_alone_opens_no_file_and_no_connection(folder, victim, sandbox_of):
    before, refused = files(folder), {*REFUSED, "EMFILE"}
    assert carried_out(sandbox_of, folder, victim, hostile.BY_A_DESCRIPTOR, refused, LIMITS_ALONE) == []
    assert files(folder) == before


@pytest.mark.security("seccomp: change modes, owners")
@LANDLOCK
def test_landlock_alone_refuses_what_it_knows(folder, victim):
    before = files(folder)
    attacks = [name for name in hostile.NAMES if name not in hostile.BESIDE_LANDLOCK]
    said = dict(line.split() for line in python(LANDLOCK_ALONE, folder, *victim, *attacks).splitlines())
    assert {name: said.get(name) for name in attacks if said.get(name) not in REFUSED} == {}
    assert files(folder) == before


CALLS = """
import ctypes, mmap, sys
from device_runtime.sandbox import kernel
from tests.device_runtime.hostile import call
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret: getpid of 32-bit programs
as_32_bit = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
as_x32 = lambda: call("syscall", 0x40000000 | 24)  # sched_yield
as_arm = lambda: None
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
name, restricted = sys.argv[1:]
if name == "as_arm":
    kernel.PROCESSORS = kernel.PROCESSORS[::-1]
if restricted == "yes":
    kernel.restrict_calls()
try:
    globals()[name]()
except OSError as error:
    sys.exit(error.errno)
"""


def code_of(name, restricted="yes"):
    """The exit code of a process that makes a system call in that way."""
    return subprocess.run([sys.executable, "-c", CALLS, name, restricted], check=False).returncode


@X86
@SECCOMP
def test_calls_as_on_another_processor_end_the_process():
    assert code_of("as_x32") == errno.EPERM
    assert code_of("as_arm") == -signal.SIGSYS
    if code_of("as_32_bit", "no"):
        pytest.skip("this kernel runs no 32-bit programs")
    assert code_of("as_32_bit") == -signal.SIGSYS


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/aarch64-linux-gnu/include/asm-generic/unistd.h")],
)
def test_numbers_of_system_calls_are_those_of_the_kernels_headers(column, header):
    if not Path(header).is_file():
        pytest.skip(f"no {header}")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    listed = {name: str(row[column]) for name, row in kernel.ALLOWED.items()}
    assert {name: known[name] for name in listed} == listed
    assert known["seccomp"] == str(kernel.SECCOMP[column])


@WHOLE
def test_a_process_that_trains_has_a_filter_and_no_powers():
    found = {}

    def watch():
        for child in children():
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines())
            found.update({name: int(status[name], 16) for name in ("NoNewPrivs", "Seccomp", "CapPrm", "CapEff")})
        return found.get("Seccomp") != 2

    with pytest.raises(DeadlinePassed):
        Sandbox("onnxruntime").train(job(busy()), WIDE, watch)
    assert found == {"NoNewPrivs": 1, "Seccomp": 2, "CapPrm": 0, "CapEff": 0}


LOOKS = """
import ctypes
from device_runtime import backends
from device_runtime.errors import ConfigError
from device_runtime.sandbox import child
def tell(**_):
    raise ConfigError(f"dumpable: {ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)}")  # PR_GET_DUMPABLE
backends.BACKENDS["onnxruntime"] = tell
child.main()
"""
DEVICE_COMMAND = """
import ctypes, sys
from muster.commands.device import main
main(["conditions", "--state", sys.argv[1]])
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""
HOST_APPLICATION = """
import ctypes, sys
from device_runtime import Device
print(Device("http://127.0.0.1:9", "p", sys.argv[1] + "/none.npz", sys.argv[1]).run_once().outcome)
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


def test_no_process_reads_a_sandbox_or_the_device_command(sandbox_of, tmp_path):
    with pytest.raises(ConfigError, match="dumpable: 0"):
        sandbox_of(LOOKS).train(job(), WIDE, lambda: True)
    assert python(DEVICE_COMMAND, tmp_path).splitlines()[-1] == "0"


def test_a_device_in_a_host_application_leaves_the_process_as_it_is(tmp_path):
    assert python(HOST_APPLICATION, tmp_path).splitlines()[-1] == "1"


HALF_OPEN = """
from device_runtime.sandbox import child, kernel
kernel._RESTRICT_SELF = 9999  # no call has this number
child.main()
"""


@LANDLOCK
def test_a_sandbox_that_cannot_be_closed_runs_no_graph(sandbox_of):
    with pytest.raises(RuntimeFailed, match=r"the sandbox cannot be closed: .*not implemented"):
        sandbox_of(HALF_OPEN).train(job(), WIDE, lambda: True)


OLD_KERNEL = """
import sys
from tests.device_runtime.hostile import without
without(444, 277 if sys.argv[2] == "aarch64" else 317)
from device_runtime import Device
from tests.device_runtime.test_sandbox import WIDE, Sandbox, job
Device("http://127.0.0.1:9", "p", "none.npz", sys.argv[1]).run_once()
print(Sandbox("onnxruntime").train(job(), WIDE, lambda: True).steps)
"""


@pytest.mark.security("what a system lacks for that, the device says at its start")
@pytest.mark.security("The device says at its start which ones it lacks")
def test_a_device_says_at_its_start_what_its_kernel_lacks_and_trains(tmp_path):
    command = [sys.executable, "-c", OLD_KERNEL, str(tmp_path), platform.machine()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0
    assert "the sandbox lacks Landlock 6 (there is none), seccomp" in done.stderr


@pytest.mark.parametrize(
    ("form", "model"), covering(FORMATS, [("digits_cnn", ()), ("logreg", ()), ("char_lstm", ((7,), 11))])
)
def test_reports_from_a_sandbox_have_the_bytes_of_those_without(form, model, request):
    name, sizes = model
    if form == "executorch":
        pytest.importorskip("executorch")
        request.getfixturevalue("executorch")
    plan, blobs = build_plan(Model(load(name, *sizes)), create("fedavg", {"batch_size": 5}), (form,))
    graphs = {name: blobs[ref] for name, ref in plan.graphs[form].items()}
    backend = FORMATS[form]
    reports = [
        trainer.train(random_job(plan, graphs), WIDE, lambda: True).values.tobytes()
        for trainer in (Sandbox(backend), InProcess(open_backend(backend)))
    ]
    assert reports[0] == reports[1]
