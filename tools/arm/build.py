"""Builds the sysroot that `simulator.fleet.arm` describes, for `muster fleet sysroot`."""

from __future__ import annotations

import contextlib
import fcntl
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from device_runtime.errors import ConfigError
from device_runtime.native import library as executorch
from fedcore.private_files import write_whole
from simulator.errors import SysrootError
from simulator.fleet import arm
from tools.arm import debian
from tools.arm.calls import call

QEMU_SUITE = "bookworm-backports"
LOADS = "import device_runtime.capabilities, device_runtime.session, simulator.fleet.fork_server; "
LOADS += "from device_runtime.backends import BACKENDS; BACKENDS['onnxruntime'](); "
LOADS += "from importlib.metadata import version; version('muster-fl')"

Tell = Callable[[str], None]


class Built(msgspec.Struct, frozen=True):
    """A sysroot: its folder and qemu, the backends of its devices, its size, and what it lacks and why."""

    folder: str
    qemu: str
    backends: tuple[str, ...]
    size_bytes: int
    lacks: str


def build(out: Path | None = None, tell: Tell = lambda doing: None) -> Built:
    """Build the sysroot in `out`, by default where a fleet looks; parts that exist are kept.

    Each part appears whole, and a second process waits for the first. Raises SysrootError, naming the program that
    failed and its message.
    """
    folder = (out or arm.default_folder()).absolute()
    with _locked(folder):
        if not arm.is_current(folder):
            _make_base(folder, tell)
        (folder / arm.IDENTITY).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / arm.IDENTITY, arm.identity().encode())
        program = arm.find_qemu(folder)
        if program is None:
            tell("qemu (60 MB)")
            program = _fetch_qemu(folder)
        sysroot = arm.Sysroot(folder, program)
        lacks = _make_executorch(sysroot, tell)
        tell("try the sysroot")
        call(sysroot.python("-c", LOADS), sysroot.environment())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return Built(str(folder), str(program), sysroot.backends, size, lacks)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build in `folder`; the lock ends with its process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_base(folder: Path, tell: Tell) -> None:
    """Make `root` from Debian and `site` from PyPI."""
    if folder.exists() and any(folder.iterdir()):
        raise SysrootError(f"{folder} holds something else, or an older sysroot: remove it, or name another folder")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        base = Path(place) / "made"
        base.mkdir()
        tell("Debian packages for 64-bit ARM (20 MB)")
        debian.unpack(arm.PACKAGES, "arm64", arm.SUITE, base / "root")
        tell("Python packages for 64-bit ARM (40 MB)")
        options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--target", str(base / "site")]
        call([sys.executable, "-m", "pip", "install", *options, *wheels_for_arm(), *arm.device_requirements()])
        (base / "recipe").write_text(arm.recipe())
        base.replace(folder)


def wheels_for_arm() -> list[str]:
    """pip's options for wheels of the emulated machine."""
    platforms = [word for name in arm.PLATFORMS for word in ("--platform", f"{name}_{arm.ARCH}")]
    return [*platforms, "--implementation", "cp", "--python-version", arm.PYTHON, "--only-binary=:all:"]


def _fetch_qemu(folder: Path) -> Path:
    """Put Debian's qemu into the sysroot `folder`. Raises SysrootError if it cannot."""
    if platform.machine() != "x86_64":
        raise SysrootError(f"this machine needs {arm.QEMU} {'.'.join(map(str, arm.OLDEST_QEMU))} or newer on its PATH")
    with tempfile.TemporaryDirectory(prefix=f".{arm.QEMU}-", dir=folder) as place:
        debian.unpack(["qemu-user"], "amd64", QEMU_SUITE, Path(place))
        return (Path(place) / "usr" / "bin" / arm.QEMU).replace(folder / arm.QEMU)


def _make_executorch(sysroot: arm.Sysroot, tell: Tell) -> str:
    """Build the ExecuTorch library. Returns why it cannot, or an empty text."""
    if "executorch" not in sysroot.backends:
        tell("ExecuTorch for 64-bit ARM")
        try:
            executorch.build(arm.ARCH, sysroot.folder / "executorch")
        except ConfigError as error:
            return f"devices run only ONNX Runtime: {error}"
    return ""
