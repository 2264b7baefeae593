"""qemu-user: the machine's own if it is new enough, else Debian's, unpacked into a sysroot."""

from __future__ import annotations

import platform
import re
import shutil
import tempfile
from pathlib import Path

from simulator.errors import SysrootError
from simulator.fleet.arm import debian
from simulator.fleet.arm.calls import call

NAME = "qemu-aarch64"
# Older ones show programs the host's /proc/cpuinfo, and ONNX Runtime crashes on that when it is imported.
OLDEST = (8, 2)
SUITE = "bookworm-backports"


def find(folder: Path) -> Path | None:
    """A suitable qemu: one on the PATH, or the one in the sysroot `folder`."""
    candidates = (shutil.which(NAME), shutil.which(f"{NAME}-static"), folder / NAME)
    return next((Path(path) for path in candidates if path and version(Path(path)) >= OLDEST), None)


def version(program: Path) -> tuple[int, int]:
    """The version of a qemu; 0.0 when it is missing or does not say."""
    try:
        match = re.search(r"version (\d+)\.(\d+)", call([str(program), "--version"]))
    except SysrootError:
        match = None
    return (int(match[1]), int(match[2])) if match else (0, 0)


def fetch(folder: Path) -> Path:
    """Put Debian's qemu into the sysroot `folder`. Raises SysrootError if that fails."""
    if platform.machine() != "x86_64":
        raise SysrootError(f"this machine needs {NAME} {'.'.join(map(str, OLDEST))} or newer on its PATH")
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder) as place:
        debian.unpack(["qemu-user"], "amd64", SUITE, Path(place))
        return (Path(place) / "usr" / "bin" / NAME).replace(folder / NAME)
