"""The folder that an emulated ARM device sees as its machine, and the start of programs in it.

root/             Debian's Python, C library and what they need, for 64-bit ARM
site/             the wheels that a device needs
muster-<digest>/  Muster's own wheel, unpacked; the digest is that of its sources
executorch/       the ExecuTorch library, where this machine can compile it
qemu-aarch64      unless the machine has one that will do
recipe            a digest of what went into root and site
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_runtime.errors import ConfigError
from device_runtime.native import build as executorch
from device_runtime.native.library import FOLDER as EXECUTORCH
from device_runtime.native.library import shim_name
from simulator.errors import SysrootError
from simulator.fleet.arm import debian, qemu
from simulator.fleet.arm.calls import call
from simulator.fleet.arm.wheel import build_wheel, device_requirements, source_digest

ARCH = "aarch64"
FOLDER = "MUSTER_SYSROOT"
COMMAND = "muster fleet sysroot"
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = (f"python{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libstdc++6", "python3-pip-whl")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
CPU = "cortex-a76"
LOADS = "import device_runtime.footprint, device_runtime.session, simulator.fleet.fork_server; "
LOADS += "from device_runtime.backends import BACKENDS; BACKENDS['onnxruntime']()"

Tell = Callable[[str], None]


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
        """The environment of an emulated program: this process's, without variables for its own Python and loader."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))}
        paths = (self.folder / "site", self.folder / f"muster-{source_digest()}")
        return {
            "QEMU_CPU": CPU,
            **inherited,
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


class Built(msgspec.Struct, frozen=True):
    """A sysroot's folder, its qemu, the backends of its devices, its size, and what it lacks and why."""

    folder: str
    qemu: str
    backends: tuple[str, ...]
    size_bytes: int
    lacks: str


def default_folder() -> Path:
    """The default folder of a sysroot: the one that MUSTER_SYSROOT names, else one in the user's cache."""
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER]).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "muster" / f"sysroot-{ARCH}-{recipe()}"


def recipe() -> str:
    """A digest of the ingredients of root and site. Raises SysrootError without a source tree."""
    parts = repr((SUITE, PACKAGES, PLATFORMS, sorted(device_requirements())))
    return hashlib.sha256(parts.encode()).hexdigest()[:12]


def ready() -> Sysroot:
    """The sysroot of these sources. Raises SysrootError, naming the command to run, when it is missing or older."""
    folder = default_folder()
    program = qemu.find(folder)
    if not _current(folder) or not (folder / f"muster-{source_digest()}").is_dir() or program is None:
        raise SysrootError(f"there is no sysroot of this release in {folder}: run `{COMMAND}`")
    return Sysroot(folder, program)


def build(out: Path | None = None, tell: Tell = lambda doing: None) -> Built:
    """Make the sysroot in `out`, by default where a fleet looks. Existing parts are kept.

    Every part appears atomically, and a second process waits for the first. Raises SysrootError, with the name and the
    output of the failed program.
    """
    folder = (out or default_folder()).absolute()
    with _locked(folder):
        if not _current(folder):
            _make_base(folder, tell)
        sources = folder / f"muster-{source_digest()}"
        if not sources.is_dir():
            tell("Muster's own wheel")
            _make_sources(sources)
        program = qemu.find(folder)
        if program is None:
            tell("qemu (60 MB)")
            program = qemu.fetch(folder)
        sysroot = Sysroot(folder, program)
        lacks = _make_executorch(sysroot, tell)
        tell("try it")
        call(sysroot.python("-c", LOADS), sysroot.environment())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return Built(str(folder), str(program), sysroot.backends, size, lacks)


def _current(folder: Path) -> bool:
    try:
        return (folder / "recipe").read_text() == recipe()
    except OSError:
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build in `folder`; the lock ends with its process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_base(folder: Path, tell: Tell) -> None:
    """root and site, from Debian and PyPI."""
    if folder.exists() and any(folder.iterdir()):
        raise SysrootError(f"{folder} holds something else, or an older sysroot: remove it, or name another folder")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        staging = Path(place) / "made"
        staging.mkdir()
        tell("Debian packages for 64-bit ARM (20 MB)")
        debian.unpack(PACKAGES, "arm64", SUITE, staging / "root")
        tell("Python packages for 64-bit ARM (40 MB)")
        options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--target", str(staging / "site")]
        call([sys.executable, "-m", "pip", "install", *options, *wheels_for_arm(), *device_requirements()])
        (staging / "recipe").write_text(recipe())
        staging.replace(folder)


def wheels_for_arm() -> list[str]:
    """pip's options to take wheels for the emulated machine."""
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_{ARCH}")]
    return [*platforms, "--implementation", "cp", "--python-version", PYTHON, "--only-binary=:all:"]


def _make_sources(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".muster-", dir=target.parent) as place:
        staging = Path(place) / "made"
        with zipfile.ZipFile(build_wheel(Path(place))) as wheel:
            wheel.extractall(staging)
        staging.replace(target)


def _make_executorch(sysroot: Sysroot, tell: Tell) -> str:
    """Build the ExecuTorch library. Returns the reason if it cannot be built, else an empty text."""
    if "executorch" not in sysroot.backends:
        tell("ExecuTorch for 64-bit ARM")
        try:
            executorch.build(ARCH, sysroot.folder / "executorch")
        except ConfigError as error:
            return f"devices run only ONNX Runtime: {error}"
    return ""
