"""The entry point of `muster`. A device's command runs here without the command framework that the others need."""

from __future__ import annotations

import gc
import sys
import traceback

from fedcore.termination import exit_on_sigterm
from muster.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE
from muster.plain import remark

OURS = {"authority", "coordinator", "device_runtime", "export", "fedcore", "ingress", "muster", "secagg", "simulator"}
USAGE_ERRORS = {
    "CompressionError",
    "UnknownAlgorithm",
    "InvalidSetting",
    "NotCrossDevice",
    "UnknownModel",
    "UnknownFormat",
    "DatasetError",
    "EngineError",
    "RunError",
    "ProfileError",
    "ProjectError",
    "StudyError",
    "InvalidTask",
    "InvalidSettings",
    "InvalidToken",
}

# What a partial installation lacks, and the extra that brings it.
EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "torch": "export",
    "onnx": "export",
    "executorch": "executorch",
    "onnxruntime": "device",
    "httpx2": "coordinator",
    "alembic": "coordinator",
    "cbor2": "coordinator",
    "fastapi": "coordinator",
    "obstore": "coordinator",
    "psycopg": "coordinator",
    "selenium": "browser",
    "pydantic": "coordinator",
    "pydantic_settings": "coordinator",
    "structlog": "coordinator",
    "prometheus_client": "coordinator",
    "jinja2": "coordinator",
    "segno": "coordinator",
    "sqlalchemy": "coordinator",
    "starlette": "coordinator",
    "uvicorn": "coordinator",
    "resvg_py": "plot",
    "pygal": "sim",
    "h5py": "data",
    "pyarrow": "data",
    "google": "data",
    "aiohttp": "dev",
}


def main() -> None:
    """Run a command; one of our errors becomes one line on standard error and an exit code."""
    # Ended like this, a command still stops the processes that it started and removes its temporary folders.
    exit_on_sigterm(EXIT_TERMINATED)
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        remark(f"error: this command needs {error.name}: pip install 'muster-fl[{extra}]'")
        sys.exit(EXIT_FAILED)
    except Exception as error:
        words = _words(error)
        for line in traceback.format_exc().splitlines() if words is None else [f"error: {words}"]:
            remark(line)
        sys.exit(EXIT_USAGE if type(error).__name__ in USAGE_ERRORS else EXIT_FAILED)
    finally:
        # The interpreter's last collection of garbage looks at every object: a second, where torch was loaded.
        gc.freeze()


def _words(error: Exception) -> str | None:
    """The sentence of an error of ours or of the operating system, whose files come first; None of other errors."""
    if type(error).__module__.partition(".")[0] in OURS:
        return str(error)
    if not isinstance(error, OSError):
        return None
    return str(error) if error.filename is None else f"{error.filename}: {error.strerror}"


def _run() -> None:
    if sys.argv[1:2] == ["device"]:
        from muster.commands import device

        sys.exit(device.main(sys.argv[2:]))
    from muster.app import app

    app()
