"""Attacks of code that took over a sandbox's process, on the files and the processes of its user.

An attack returns when it did what it wanted, and raises OSError when the system refuses it. It takes back its limits
first, as far as it may, so that what refuses it is not a limit alone.
"""

import ctypes
import errno
import os
import resource
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from device_runtime.errors import RuntimeFailed

LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SEIZE = 16, 17, 0x4206
RMID, CREATE = 0, 0o1600
IO_URING_SETUP = 425  # everywhere
EXAMPLE = "an example 0.25"
ABSTRACT = "\0muster-{}"
VICTIM = """
import ctypes, os, socket, sys
from tests.device_runtime.hostile import ABSTRACT
secret = ctypes.create_string_buffer(b"a secret")
with socket.socket(socket.AF_UNIX) as end:
    end.bind(ABSTRACT.format(os.getpid()))
    end.listen()
    print(ctypes.addressof(secret), flush=True)
    sys.stdin.read()
"""


class Victim(NamedTuple):
    """A process of the same user's, and an address in its memory."""

    pid: int
    address: int


def call(name, *arguments):
    """Call a function of the C library. Raises OSError."""
    answer = getattr(LIBC, name)(*arguments)
    if answer == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return answer


class Attacks:
    """The attacks, by the names of their methods. folder: the device's state. victim: another process of the user's."""

    def __init__(self, folder, victim):
        self._folder, self._victim = Path(folder), victim

    def reads_an_example(self):
        (self._folder / "examples.npz").read_bytes()

    def lists_the_folder(self):
        os.listdir(self._folder)

    def unlinks_the_database(self):
        (self._folder / "state.db").unlink()

    def renames_the_sealing_key(self):
        os.rename(self._folder / "sealing-key", self._folder / "sealing-key.old")

    def moves_the_sealing_key_elsewhere(self):
        os.rename(self._folder / "sealing-key", self._folder / "elsewhere" / "sealing-key")

    def truncates_the_examples(self):
        os.truncate(self._folder / "examples.npz", 0)

    def writes_the_policy(self):
        with (self._folder / "policy.toml").open("a") as policy:
            policy.write("unsigned_programs = true\n")

    def leaves_an_example_in_the_name_of_a_file(self):
        (self._folder / EXAMPLE).touch()

    def leaves_an_example_in_the_name_of_a_folder(self):
        (self._folder / EXAMPLE).mkdir()

    def leaves_an_example_in_a_link(self):
        os.symlink(EXAMPLE, self._folder / "link")

    def links_the_sealing_key(self):
        os.link(self._folder / "sealing-key", self._folder / EXAMPLE)

    def makes_a_fifo(self):
        os.mkfifo(self._folder / EXAMPLE)

    def removes_a_folder(self):
        (self._folder / "elsewhere").rmdir()

    def changes_the_mode_of_the_policy(self):
        (self._folder / "policy.toml").chmod(0o666)

    def gives_the_policy_away(self):
        os.chown(self._folder / "policy.toml", 65534, 65534)

    def leaves_an_example_in_the_time_of_a_file(self):
        os.utime(self._folder / "policy.toml", (25, 25))

    def leaves_an_example_in_an_attribute(self):
        os.setxattr(self._folder / "policy.toml", "user.example", EXAMPLE.encode())

    def sees_whether_a_file_is_there(self):
        os.stat(self._folder / "state.db")

    def leaves_a_message_queue(self):
        call("msgctl", call("msgget", 0, CREATE), RMID, None)

    def leaves_shared_memory(self):
        call("shmctl", call("shmget", 0, ctypes.c_size_t(4096), CREATE), RMID, None)

    def leaves_semaphores(self):
        call("semctl", call("semget", 0, 1, CREATE), 0, RMID, None)

    def leaves_a_posix_queue(self):
        os.close(call("mq_open", b"/muster", os.O_CREAT | os.O_RDWR, 0o600, None))
        call("mq_unlink", b"/muster")

    def traces_the_device(self):
        call("ptrace", PTRACE_ATTACH, self._victim.pid, None, None)
        os.waitpid(self._victim.pid, 0x40000000)  # __WALL
        call("ptrace", PTRACE_DETACH, self._victim.pid, None, None)

    def seizes_the_device(self):
        call("ptrace", PTRACE_SEIZE, self._victim.pid, None, None)

    def reads_the_memory_of_the_device(self):
        self._transfer("process_vm_readv")

    def writes_the_memory_of_the_device(self):
        self._transfer("process_vm_writev")

    def opens_the_memory_of_the_device(self):
        Path(f"/proc/{self._victim.pid}/mem").open("rb").close()

    def reads_the_environment_of_the_device(self):
        Path(f"/proc/{self._victim.pid}/environ").read_bytes()

    def takes_a_descriptor_of_the_device(self):
        os.close(call("pidfd_getfd", os.pidfd_open(self._victim.pid), 0, 0))

    def ends_the_device(self):
        os.kill(self._victim.pid, 0)

    def slows_the_device(self):
        os.setpriority(os.PRIO_PROCESS, self._victim.pid, 19)

    def limits_the_device(self):
        resource.prlimit(self._victim.pid, resource.RLIMIT_CORE, (0, 0))

    def pins_the_device(self):
        os.sched_setaffinity(self._victim.pid, {0})

    def starts_a_process(self):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)

    def becomes_another_program(self):
        os.execv("/bin/true", ["true"])

    def speaks_to_an_abstract_socket(self):
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(ABSTRACT.format(self._victim.pid))

    def opens_a_connection(self):
        with socket.socket() as end, suppress(ConnectionRefusedError):
            end.connect(("127.0.0.1", 9))

    def listens(self):
        with socket.socket() as end:
            end.bind(("127.0.0.1", 0))

    def raises_its_limits(self):
        call("setrlimit", resource.RLIMIT_NOFILE, (ctypes.c_ulong * 2)(64, 64))

    def works_by_a_ring(self):
        parameters = ctypes.create_string_buffer(120)
        os.close(call("syscall", IO_URING_SETUP, 1, parameters))

    def _transfer(self, name):
        """Read or write eight bytes of the victim's memory."""
        own = ctypes.create_string_buffer(8)
        ours = (ctypes.c_void_p * 2)(ctypes.addressof(own), 8)
        theirs = (ctypes.c_void_p * 2)(self._victim.address, 8)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        call(name, self._victim.pid, ours, one, theirs, one, none)


READ, WRITE, PRIVATE, SHARED, ANONYMOUS, DOWN = 1, 2, 2, 1, 0x20, 0x100  # <sys/mman.h>, of Linux
# Ways to memory, by the flags of the mapping: a process's own, which the kernel counts as data, and what it does not.
HOARDS = {
    "its own": PRIVATE,
    "shared": SHARED,
    "a stack": PRIVATE | DOWN,
    "filled and then read-only": PRIVATE,
    "only read": PRIVATE,
}
PIECE = 16 * 2**20


def hoard(way, most):
    """The bytes of address space that can be taken in a way, until the system refuses or there are `most`."""
    LIBC.mmap.restype = ctypes.c_void_p
    LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    rights = READ if way == "only read" else READ | WRITE
    taken = 0
    while taken < most:
        place = LIBC.mmap(None, PIECE, rights, HOARDS[way] | ANONYMOUS, -1, 0)
        if place == ctypes.c_void_p(-1).value:
            break
        taken += PIECE
        if rights & WRITE:
            ctypes.memset(place, 1, PIECE)
        if way == "filled and then read-only":
            LIBC.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(PIECE), READ)
    return taken


NAMES = [name for name in vars(Attacks) if not name.startswith("_")]
# What Landlock has no right for; some of it is refused all the same to who is not root, or has no capabilities.
BESIDE_LANDLOCK = {
    "changes_the_mode_of_the_policy",
    "gives_the_policy_away",
    "leaves_an_example_in_the_time_of_a_file",
    "leaves_an_example_in_an_attribute",
    "sees_whether_a_file_is_there",
    "leaves_a_message_queue",
    "leaves_shared_memory",
    "leaves_semaphores",
    "leaves_a_posix_queue",
    "slows_the_device",
    "limits_the_device",
    "pins_the_device",
    "starts_a_process",
    "raises_its_limits",
    "works_by_a_ring",
}

# What takes a descriptor.
BY_A_DESCRIPTOR = [
    "reads_an_example",
    "lists_the_folder",
    "writes_the_policy",
    "leaves_an_example_in_the_name_of_a_file",
    "opens_the_memory_of_the_device",
    "reads_the_environment_of_the_device",
    "takes_a_descriptor_of_the_device",
    "speaks_to_an_abstract_socket",
    "opens_a_connection",
    "listens",
    "works_by_a_ring",
]


def outcome(attack, folder, victim):
    """`done`, or the name of the error with which the system refuses an attack."""
    for kind, most in ((resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_FSIZE, 2**20)):
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
    try:
        getattr(Attacks(folder, victim), attack)()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"


class Hostile:
    """A backend that makes attacks when it is given a graph.

    The error that it raises has their number, and each that the system did not refuse with an error of `refused`.
    """

    format, runtime = "onnx", "hostile"

    def __init__(self, attacks, folder, victim, refused):
        self._attacks, self._target, self._refused = attacks, (folder, victim), refused

    def load(self, graph, name):
        outcomes = [(attack, outcome(attack, *self._target)) for attack in self._attacks]
        raise RuntimeFailed(
            "attacked", repr([len(outcomes), *(one for one in outcomes if one[1] not in self._refused)])
        )


def without(*numbers):
    """Take system calls from this process and those that it starts: a kernel that does not know them."""
    unknown = [(0x15, 0, 1, number, 0x06, 0, 0, 0x00050000 | errno.ENOSYS) for number in numbers]
    lines = [(0x20, 0, 0, 0), *(row[at : at + 4] for row in unknown for at in (0, 4)), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    call("prctl", 38, *map(ctypes.c_ulong, (1, 0, 0, 0)))  # PR_SET_NO_NEW_PRIVS
    call("prctl", 22, ctypes.c_ulong(2), struct.pack("HP", len(lines), ctypes.addressof(code)))  # PR_SET_SECCOMP
