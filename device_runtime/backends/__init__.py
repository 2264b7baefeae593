"""Engines that run a plan's graphs, by name. Each is loaded when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable

from device_runtime.backends.backend import Backend
from device_runtime.errors import ConfigError


def _onnxruntime() -> Backend:
    from device_runtime.backends.onnxruntime import OnnxRuntime  # noqa: PLC0415

    return OnnxRuntime()


def _executorch() -> Backend:
    from device_runtime.backends.executorch import ExecuTorch  # noqa: PLC0415

    return ExecuTorch()


BACKENDS: dict[str, Callable[[], Backend]] = {"onnxruntime": _onnxruntime, "executorch": _executorch}
FORMATS = {"onnx": "onnxruntime", "executorch": "executorch"}
"""The backend for each format of graphs."""


def open_backend(name: str) -> Backend:
    """The engine of this name, loaded. Raises ConfigError when there is none, or it cannot be loaded here."""
    if name not in BACKENDS:
        raise ConfigError(f"no backend is called {name!r}; there is {sorted(BACKENDS)}")
    return BACKENDS[name]()
