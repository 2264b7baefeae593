"""Engines that run a plan's graphs, by name. Each is loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from device_runtime.backends.backend import Backend
from device_runtime.errors import ConfigError


def _onnxruntime(*, alone: bool = False) -> Backend:
    from device_runtime.backends.onnxruntime import OnnxRuntime

    return OnnxRuntime(alone=alone)


def _executorch(*, alone: bool = False) -> Backend:  # which keeps no memory
    from device_runtime.backends.executorch import ExecuTorch

    return ExecuTorch()


BACKENDS: dict[str, Callable[..., Backend]] = {"onnxruntime": _onnxruntime, "executorch": _executorch}
FORMATS = {"onnx": "onnxruntime", "executorch": "executorch"}
"""The backend for each format of graphs."""


def unsupported(own: str, offered: Sequence[str]) -> str:
    """A message, with a remedy, for a device that runs graphs in format `own` when tasks have only `offered`."""
    other = [f"run it with --backend {FORMATS[name]}" for name in offered if name in FORMATS]
    remedy = ", or ".join([*other, f"export the plan for {own!r} too"])
    return f"this device runs graphs in format {own!r}, the tasks for it have {', '.join(map(repr, offered))}: {remedy}"


def runtime_of(name: str) -> str:
    """Name and version of the engine of this name, without loading it. Raises ConfigError if it is not installed."""
    if name == "executorch":
        from device_runtime.backends.executorch import VERSION, find

        find()
        return f"executorch {VERSION}"
    _check(name)
    try:
        return f"{name} {_version(name)}"
    except PackageNotFoundError as error:
        raise ConfigError(f"{name} is not installed: pip install 'muster-fl[device]'") from error


@cache
def _version(package: str) -> str:
    # The lookup searches the files of all installed packages, which takes milliseconds.
    return version(package)


def open_backend(name: str, *, alone: bool = False) -> Backend:
    """Load the engine of this name. Raises ConfigError when there is none, or it cannot be loaded here.

    alone: whether this process does nothing else, and so may keep memory until it ends.
    """
    _check(name)
    return BACKENDS[name](alone=alone)


def _check(name: str) -> None:
    if name not in BACKENDS:
        raise ConfigError(f"no backend is called {name!r}; there is {sorted(BACKENDS)}")
