"""Hosts of emulated devices: a fork server here, one on 64-bit ARM under qemu, Node for TypeScript, Java for Kotlin."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

import device_runtime
from device_runtime.backends.executorch import FOLDER as EXECUTORCH, shim_name
from fedcore.validation import decoder
from simulator.errors import FleetError, SysrootError
from simulator.fleet import browsers
from simulator.fleet.fork_server import Ended, Start

# 64-bit ARM devices on another machine: a sysroot, which `tools.arm` makes, and how qemu-user runs its Python there.
#
# root/             Debian's Python, C library and what they need, for 64-bit ARM
# site/             the wheels that a device needs
# executorch/       the ExecuTorch library, where the machine that made it can compile it
# qemu-aarch64      unless that machine has one that will do
# muster/           the name and version of Muster, as of an installed package
# recipe            a digest of what went into root and site
#
# Muster's code is that of this process: it is Python alone, and emulated programs see the files of this machine.


ARCH = "aarch64"
FOLDER = "MUSTER_SYSROOT"
COMMAND = "muster fleet sysroot"
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = (f"python{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libstdc++6", "python3-pip-whl")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
CPU = "cortex-a76"
QEMU = "qemu-aarch64"
OLDEST_QEMU = (8, 2)
"""Older ones show programs the host's /proc/cpuinfo, and ONNX Runtime crashes on that when it is imported."""
_MUSTER = Path(__file__).parents[2]
IDENTITY = Path("muster", "muster_fl.dist-info", "METADATA")


@dataclass(frozen=True, slots=True)
class Sysroot:
    """A whole sysroot, and the qemu that runs its programs."""

    folder: Path
    qemu: Path

    def python(self, *arguments: str) -> list[str]:
        """The command line of the emulated machine's Python."""
        root = self.folder / "root"
        return [str(self.qemu), "-L", str(root), str(root / "usr" / "bin" / f"python{PYTHON}"), *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of an emulated program: this process's, less what is for its own Python and loader."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))}
        paths = (self.folder / "site", self.folder / "muster", _MUSTER)
        return {
            "QEMU_CPU": CPU,
            **kept,
            "OMP_NUM_THREADS": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            EXECUTORCH: str(self.folder / "executorch"),
            **more,
        }

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that devices can run here."""
        has_executorch = (self.folder / "executorch" / shim_name(ARCH)).is_file()
        return ("onnxruntime", "executorch") if has_executorch else ("onnxruntime",)

    def check(self, backends: Sequence[str]) -> None:
        """Raise SysrootError when devices cannot run these backends here."""
        if not set(backends) <= set(self.backends):
            raise SysrootError(
                f"ARM devices run {', '.join(self.backends)} here, not {', '.join(backends)}: install a compiler for "
                f"them (on Debian: apt-get install g++-aarch64-linux-gnu) and run `{COMMAND}` again"
            )


def default_folder() -> Path:
    """Where a sysroot is made and looked for: what MUSTER_SYSROOT names, else in the user's cache."""
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER]).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "muster" / f"sysroot-{ARCH}-{recipe()}"


def recipe() -> str:
    """A digest of what root and site are made of."""
    parts = repr((SUITE, PACKAGES, PLATFORMS, sorted(device_requirements())))
    return hashlib.sha256(parts.encode()).hexdigest()[:12]


def device_requirements() -> list[str]:
    """The packages that a device needs beside Muster itself."""
    requirements = (line.partition("; extra == ") for line in metadata.requires("muster-fl") or ())
    return [name for name, _, extra in requirements if extra in {"", '"device"'}]


def is_current(folder: Path) -> bool:
    """Whether root and site of a sysroot are what they would be made of now."""
    return _holds(folder / "recipe", recipe())


def identity() -> str:
    """The name and version of Muster, which devices tell, as the metadata of an installed package."""
    return f"Metadata-Version: 2.1\nName: muster-fl\nVersion: {metadata.version('muster-fl')}\n"


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def ready() -> Sysroot:
    """The sysroot of this release. Raises SysrootError, naming the command to run, when it is missing or older."""
    folder = default_folder()
    program = find_qemu(folder)
    if not is_current(folder) or not _holds(folder / IDENTITY, identity()) or program is None:
        raise SysrootError(f"there is no sysroot of this release in {folder}: run `{COMMAND}` in a checkout")
    return Sysroot(folder, program)


def find_qemu(folder: Path) -> Path | None:
    """A qemu that will do: one on the PATH, or the one in the sysroot `folder`."""
    places = (shutil.which(QEMU), shutil.which(f"{QEMU}-static"), folder / QEMU)
    return next((Path(path) for path in places if path and qemu_version(Path(path)) >= OLDEST_QEMU), None)


def qemu_version(program: Path) -> tuple[int, int]:
    """The version of a qemu; 0.0 when it is not there or does not say."""
    try:
        words = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0, 0
    said = re.search(r"version (\d+)\.(\d+)", words)
    return (int(said[1]), int(said[2])) if said else (0, 0)


# Hosts of emulated devices: a fork server for each architecture, here or under qemu, and Node for TypeScript.


JS_FOLDER = Path(device_runtime.__file__).parent / "js"
_FLEET = JS_FOLDER / "src" / "node" / "fleet.ts"


def fleet_command() -> list[str]:
    """The command line of a process that runs many devices, as a fork server does. Raises FleetError."""
    return [program(), "--no-warnings", str(_FLEET)]


def program() -> str:
    """The path of Node, if it can run the device runtime in TypeScript. Raises FleetError, saying what is missing."""
    if not _FLEET.exists():
        raise FleetError(f"there is no device runtime in TypeScript at {JS_FOLDER}: run this from a checkout of Muster")
    path = shutil.which("node")
    is_new = [path or "", str(JS_FOLDER / "node-is-new.cjs")]
    if path is None or subprocess.run(is_new, check=False, capture_output=True).returncode != 0:
        what = f"{path} is older" if path else "there is none on the PATH"
        raise FleetError(
            f"devices on Node need Node 22.18 or newer, and {what}: `npm install --global node@24` has one"
        )
    if not (JS_FOLDER / "node_modules" / ".package-lock.json").exists():
        raise FleetError(f"devices on Node need their packages: `npm ci --prefix {JS_FOLDER}` installs them")
    return path


JVM_PROGRAM = Path(device_runtime.__file__).parent / "android" / "jvm" / "target" / "muster-device.jar"

# Classes as the JVM keeps them, which `make android` writes. The JVM goes without where they are missing or older than
# the program, and says so on standard output unless it is told not to.
JVM_OPTIONS = (
    "-XX:+UseSerialGC",
    f"-XX:SharedArchiveFile={JVM_PROGRAM.with_suffix('.jsa')}",
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
)


def java_command(*words: str) -> list[str]:
    """The command line of the device runtime in Kotlin. Raises FleetError, saying what is missing."""
    if (java := shutil.which("java")) is None:
        raise FleetError("devices on the JVM need Java 17 or newer, and there is none on the PATH")
    if not JVM_PROGRAM.exists():
        raise FleetError(f"devices on the JVM need {JVM_PROGRAM}: `make android` in a checkout of Muster builds it")
    return [java, *JVM_OPTIONS, "-jar", str(JVM_PROGRAM), *words]


_ENDED = decoder(Ended)

HERE: str = platform.machine()
NODE, BROWSER, JVM = "node", "browser", "jvm"
DIED = "a process that runs emulated devices died; standard error says why"

StartSession = Callable[[str, Start], None]
"""Starts a session at a host: an architecture, NODE, BROWSER or JVM."""
EndedSessions = queue.SimpleQueue[Ended | None]
"""Ends of sessions at all hosts; None once a host has died."""
ForkServers = tuple[StartSession, EndedSessions]
"""The hosts of devices, for one fleet at a time."""


def architectures() -> tuple[str, ...]:
    """The architectures of devices: this machine's own first, then those that can be emulated."""
    return tuple(dict.fromkeys((HERE, ARCH)))


@contextlib.contextmanager
def fork_servers(backends: Mapping[str, Sequence[str]]) -> Iterator[ForkServers]:
    """A host for every name in `backends`: a runtime's, or an architecture's with the backends that its devices load.

    Raises SysrootError when an architecture cannot be emulated here yet, or not with these backends, and FleetError if
    Node, Java or a browser is needed and missing.
    """
    ended: EndedSessions = queue.SimpleQueue()
    commands = {host: host_command(host, names) for host, names in backends.items()}
    with contextlib.ExitStack() as stack:
        starts = {host: stack.enter_context(_process(*command, ended)) for host, command in commands.items()}
        yield lambda host, start: starts[host](start), ended


def host_command(host: str, backends: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a host. Raises FleetError or SysrootError where something is missing."""
    if host == NODE:
        return fleet_command(), dict(os.environ)
    if host == BROWSER:
        return browsers.command(), dict(os.environ)
    if host == JVM:
        return java_command("fleet"), {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["-m", "simulator.fleet.fork_server", *backends]
    if host == HERE:
        return [sys.executable, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    machine = ready()
    machine.check(backends)
    return machine.python(*arguments), machine.environment()


@contextlib.contextmanager
def _process(
    command: list[str], environment: dict[str, str], ended: EndedSessions
) -> Iterator[Callable[[Start], None]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise FleetError("the fork server has no pipes")

    def read() -> None:
        for line in stdout:
            ended.put(_ENDED.decode(line))
        ended.put(None)

    def send(start: Start) -> None:
        try:
            stdin.write(msgspec.json.encode(start) + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise FleetError(DIED) from error

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield send
    finally:
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        process.wait()
        reader.join()
        stdout.close()
