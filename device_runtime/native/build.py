"""The build of the library that runs ExecuTorch programs without torch: parts from PyPI, and a C interface to them.

The build needs pip, access to PyPI and a C++ compiler. The result needs none of them and may be copied to devices.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import msgspec

from device_runtime.errors import ConfigError
from device_runtime.native.library import SHIM, SOURCE, VERSION, default_folder, shim_name

LIBRARIES = ("executorch", "executorch_kernels_optimized", "executorch_backend_xnnpack", "executorch_threadpool")
SHA256 = {
    "x86_64": "274c28c2fe2b76acb03f9fa381537425c40e0098dcf886baf6d97a1a55ffe300",
    "aarch64": "8ee02348a3ea80ddf770822911ebf78da616b73afce0fbaaa79f23311c88c66a",
}
"""The digest of ExecuTorch's wheel for each architecture. pip refuses any other file."""
INCLUDES = ("executorch/include", "executorch/include/executorch/runtime/core/portable_type/c10")
# The headers' own demands (executorch-config.cmake in the wheel): their layout follows these.
DEFINED = ("C10_USING_CUSTOM_GENERATED_MACROS", "ET_EVENT_TRACER_ENABLED", "ET_USE_THREADPOOL")


class Build(msgspec.Struct, frozen=True):
    """The folder that was written, the size in bytes of every file, and their sum."""

    folder: str
    files: dict[str, int]
    size_bytes: int


def build(arch: str | None = None, out: Path | None = None) -> Build:
    """Build for `arch` into `out`; by default for this machine, into the folder where a device looks.

    Every file is replaced atomically, the shim last, so readers never find half a build and concurrent builds are safe.
    Raises ConfigError when the architecture is unknown, or pip or the compiler is missing or fails.
    """
    arch = arch or platform.machine()
    if arch not in SHA256:
        raise ConfigError(f"ExecuTorch can be built for {', '.join(SHA256)}, not for {arch!r}")
    compiler = _compiler(arch)
    out = (out or default_folder(arch)).absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        work = Path(folder)
        _unpack(_download(arch, work), work)
        shim = _compile(compiler, work, shim_name(arch))
        built = [*(work / "executorch" / "lib" / f"lib{name}.so" for name in LIBRARIES), shim]
        files = {path.name: path.stat().st_size for path in built}
        for path in built:
            path.replace(out / path.name)
    for path in set(out.glob(f"{SHIM}-*.so")) - {out / shim.name}:
        path.unlink(missing_ok=True)
    return Build(str(out), files, sum(files.values()))


def _compiler(arch: str) -> str:
    name, package = "g++", "g++"
    if arch != platform.machine():
        name, package = f"{arch}-linux-gnu-g++", f"g++-{arch.replace('_', '-')}-linux-gnu"
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"building for {arch} needs the compiler {name}; on Debian: apt-get install {package}")
    return path


def _download(arch: str, folder: Path) -> Path:
    """The wheel, in `folder`. Its libraries do not depend on the Python that it is for."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"executorch=={VERSION} --hash=sha256:{SHA256[arch]}\n", "utf-8")
    what = ["--requirement", str(wanted), "--require-hashes", "--no-deps", "--only-binary=:all:"]
    how = ["--disable-pip-version-check", "--quiet"]
    target = ["--platform", f"manylinux_2_28_{arch}", "--implementation", "cp", "--python-version", "311"]
    _call([sys.executable, "-m", "pip", "download", *what, *how, *target, "--dest", str(folder)], "pip")
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> None:
    """The headers and libraries out of `wheel`."""
    wanted = {f"executorch/lib/lib{name}.so" for name in LIBRARIES}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name in wanted or name.startswith("executorch/include/")]
        archive.extractall(folder, names)


def _compile(compiler: str, folder: Path, name: str) -> Path:
    shim = folder / name
    headers = [word for path in INCLUDES for word in ("-isystem", str(folder / path))]
    # Kernels and back-ends register themselves when they are loaded; nothing refers to them.
    libraries = ["-L", str(folder / "executorch" / "lib"), "-Wl,--no-as-needed", *(f"-l{name}" for name in LIBRARIES)]
    options = ["-std=c++17", "-O2", "-s", "-shared", "-fPIC", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN"]
    defined = [f"-D{word}" for word in DEFINED]
    _call([compiler, *options, *defined, *headers, str(SOURCE), "-o", str(shim), *libraries], Path(compiler).name)
    return shim


def _call(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        telling = [line for line in lines if "error" in line.lower()] or lines
        raise ConfigError(f"{name} failed: {telling[-1].strip()}")
