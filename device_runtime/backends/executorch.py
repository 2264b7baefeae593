"""ExecuTorch: its library on this machine, and the engine on one CPU thread through C functions of that library.

A program has two methods: `forward`, and `ports`, which returns a uint8 vector that holds UTF-8 JSON: the names of the
inputs and of the outputs of `forward`, in their order, as {"inputs": [...], "outputs": [...]}. Shapes are fixed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from device_runtime.backends.backend import Arrays, Edge, Executable, address
from device_runtime.errors import ConfigError, PlanRefused, RuntimeFailed
from fedcore.validation import decoder

# The ExecuTorch library on this machine: its build, its place, and the C functions that it offers.


VERSION = "1.5.1"
FOLDER = "MUSTER_EXECUTORCH"
COMMAND = "muster device build-executorch"
SHIM = "libmuster_executorch"
SOURCE = Path(__file__).with_name("executorch_shim.cpp")


def default_folder(arch: str) -> Path:
    """The folder of a build for `arch`: the one that MUSTER_EXECUTORCH names, else one in the user's cache."""
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "muster" / f"executorch-{VERSION}-{arch}"


def shim_name(arch: str) -> str:
    """The file name of the shim for `arch`. It changes with the source, so that an older build is not used."""
    digest = hashlib.sha256(f"{VERSION} {arch}\n".encode() + SOURCE.read_bytes()).hexdigest()
    return f"{SHIM}-{digest[:12]}.so"


@functools.cache
def library() -> ctypes.CDLL:
    """The shim for this machine, set up so that it starts no more threads.

    Raises ConfigError, naming the command to run, when no shim loads.
    """
    path = find()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"the ExecuTorch library does not load: {error}; run `{COMMAND}` again") from error
    pointer = ctypes.c_void_p
    functions = {
        "set_up": (ctypes.c_bool, []),
        "load": (pointer, [ctypes.c_char_p, ctypes.c_size_t]),
        "unload": (None, [pointer]),
        "failure": (ctypes.c_char_p, []),
        "count": (ctypes.c_size_t, [pointer, ctypes.c_bool]),
        "port": (ctypes.c_bool, [pointer, ctypes.c_bool, ctypes.c_size_t, pointer, pointer, pointer]),
        "constant": (ctypes.c_bool, [pointer, ctypes.c_char_p, pointer, pointer]),
        "run": (ctypes.c_bool, [pointer, pointer, pointer]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(loaded, f"muster_{name}")
        function.restype, function.argtypes = result, arguments
    if not loaded.muster_set_up():
        raise ConfigError(
            f"the ExecuTorch library cannot be set up: {loaded.muster_failure().decode(errors='replace')}"
        )
    return loaded


def find() -> Path:
    """The file of the shim. Raises ConfigError, naming the command to run, when there is none."""
    arch = platform.machine()
    folder = default_folder(arch)
    path = folder / shim_name(arch)
    if path.is_file():
        return path
    if any(folder.glob(f"{SHIM}-*.so")):
        raise ConfigError(f"the ExecuTorch library in {folder} is of another release or machine: run `{COMMAND}` again")
    raise ConfigError(f"no ExecuTorch library in {folder}: run `{COMMAND}`, or name its folder in {FOLDER}")


# The build of the library that runs ExecuTorch programs without torch: parts from PyPI, and a C interface to them.
#
# The build needs pip, access to PyPI and a C++ compiler. The result needs none of them and may be copied to devices.

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


# ExecuTorch on one CPU thread, through the C interface of device_runtime/backends/executorch_shim.cpp: no torch.


KEPT = 2
# ExecuTorch's numbers of its element types.
DTYPES = {
    number: np.dtype(name)
    for number, name in enumerate(("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))
} | {11: np.dtype("bool")}


class _Names(msgspec.Struct):
    inputs: list[str]
    outputs: list[str]


_NAMES = decoder(_Names)


@dataclass(frozen=True, slots=True)
class _Port:
    """One input or output: the type and shape of the arrays that can be bound to it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class ExecuTorch:
    """The backend of ExecuTorch programs. Raises ConfigError when its library is not built."""

    format = "executorch"
    runtime = f"executorch {VERSION}"

    def __init__(self) -> None:
        self._library = library()

    def load(self, graph: bytes, name: str = "graph") -> Executable:
        """Prepare a program. Raises PlanRefused when ExecuTorch cannot read it or lacks one of its operators."""
        return _Program(self._library, graph, name)


class _Program:
    """A loaded program with the pointers of the last few sets of arrays: a device loop alternates between two."""

    def __init__(self, library: ctypes.CDLL, graph: bytes, name: str) -> None:
        self._library, self._name = library, name
        self._bytes = graph  # the loaded program points into it
        self._handle = library.muster_load(graph, len(graph))
        if not self._handle:
            raise self._refused()
        names = self._names()
        self._inputs, self._outputs = self._ports(names.inputs, 0), self._ports(names.outputs, 1)
        self._edge = Edge(name, frozenset(names.inputs), frozenset(names.outputs))
        # A kept binding references its arrays, so their addresses stay valid and an id always means the same array.
        self._kept: dict[tuple[object, ...], tuple[Any, Any, list[NDArray[Any]]]] = {}

    def __del__(self) -> None:
        self._library.muster_unload(self._handle)

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Compute `outputs` from `inputs`: see Executable. Bindings of known arrays are reused."""
        self._edge.check_names(inputs, outputs)
        key = (*[id(inputs[port.name]) for port in self._inputs], *map(id, outputs.values()), *outputs)
        if key not in self._kept:
            bound = self._bind(inputs, outputs)
            if len(self._kept) == KEPT:
                self._kept.clear()
            self._kept[key] = bound
        sources, targets, _ = self._kept[key]
        if not self._library.muster_run(self._handle, sources, targets):
            raise RuntimeFailed(f"graph {self._name!r} failed", self._failure())

    def _bind(self, inputs: Arrays, outputs: Arrays) -> tuple[Any, Any, list[NDArray[Any]]]:
        self._edge.check_memory(inputs, outputs)
        sources = [inputs[port.name] for port in self._inputs]
        # The program computes every output, even those that the caller did not request.
        targets = [
            outputs[port.name] if port.name in outputs else np.empty(port.shape, port.dtype) for port in self._outputs
        ]
        for port, array in zip((*self._inputs, *self._outputs), (*sources, *targets), strict=True):
            self._refuse_misfit(port, array)
        arrays = [*(inputs[port.name] for port in self._inputs), *outputs.values(), *targets]
        return _addresses(sources), _addresses(targets), arrays

    def _refuse_misfit(self, port: _Port, array: NDArray[Any]) -> None:
        if (array.dtype, array.shape) != (port.dtype, port.shape):
            raise RuntimeFailed(
                f"graph {self._name!r} failed",
                f"{port.name!r} is {port.dtype} {list(port.shape)}, not {array.dtype} {list(array.shape)}",
            )

    def _names(self) -> _Names:
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        if not self._library.muster_constant(self._handle, b"ports", ctypes.byref(data), ctypes.byref(size)):
            raise self._refused()
        try:
            return _NAMES.decode(ctypes.string_at(data, size.value))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PlanRefused(f"ExecuTorch program {self._name!r} does not name its ports: {error}") from error

    def _ports(self, names: list[str], output: int) -> list[_Port]:
        count = self._library.muster_count(self._handle, output)
        if len(set(names)) != count or len(names) != count:
            raise PlanRefused(f"ExecuTorch program {self._name!r} has {count} ports, not one for each of {names}")
        return [self._port(name, output, index) for index, name in enumerate(names)]

    def _port(self, name: str, output: int, index: int) -> _Port:
        kind, sizes, rank = ctypes.c_int(), ctypes.POINTER(ctypes.c_int32)(), ctypes.c_size_t()
        where = ctypes.byref(kind), ctypes.byref(sizes), ctypes.byref(rank)
        if not self._library.muster_port(self._handle, output, index, *where):
            raise self._refused()
        if kind.value not in DTYPES:
            raise PlanRefused(f"port {name!r} of ExecuTorch program {self._name!r} has the unknown type {kind.value}")
        return _Port(name, DTYPES[kind.value], tuple(sizes[: rank.value]))

    def _refused(self) -> PlanRefused:
        return PlanRefused(f"ExecuTorch cannot load graph {self._name!r}: {self._failure()}")

    def _failure(self) -> str:
        text: bytes = self._library.muster_failure()
        return text.decode(errors="replace")


def _addresses(arrays: list[NDArray[Any]]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*map(address, arrays))
