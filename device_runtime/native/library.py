"""The ExecuTorch library on this machine, and the C functions that `executorch_shim.cpp` defines in it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
from pathlib import Path

from device_runtime.errors import ConfigError

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
