"""The entry point of `muster`. `muster device` runs without the command framework, which other commands need."""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Any, NoReturn

from fedcore.errors import in_our_words
from fedcore.private_files import exit_on_sigterm
from muster.plain import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE, OURS, remark

USAGE_ERRORS = {
    "CompressionError",
    "UnknownAlgorithm",
    "InvalidSetting",
    "UnknownModel",
    "UnknownFormat",
    "DatasetError",
    "EngineError",
    "ForecastError",
    "RunError",
    "ProfileError",
    "ProjectError",
    "StudyError",
    "InvalidTask",
    "InvalidSettings",
    "InvalidToken",
    "QuestionError",
    "QueryError",
    "UnknownDeviceId",
    "UnknownRound",
    "UnknownTask",
    "UnknownToken",
}
EXCERPTS = {"QuestionError", "QueryError"}
"""Errors of several lines: they show the place in a query that was typed."""

# Packages that a partial installation may lack, and the extra that has each.
EXTRAS = {
    package: extra
    for extra, packages in {
        "cli": "typer rich",
        "export": "torch onnx sqlglot",
        "executorch": "executorch",
        "device": "onnxruntime",
        "coordinator": "httpx2 alembic cbor2 fastapi obstore psycopg pydantic pydantic_settings structlog "
        "prometheus_client jinja2 segno sqlalchemy starlette uvicorn",
        "browser": "selenium",
        "plot": "resvg_py",
        "sim": "pygal",
        "data": "h5py pyarrow google",
        "dev": "aiohttp",
    }.items()
    for package in packages.split()
}


def main() -> None:
    """Run a command; one of our errors becomes one line on standard error and an exit code."""
    # On SIGTERM too, a command stops its processes and removes its temporary folders.
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
        whole = traceback.format_exc() if words is None else f"error: {words}"
        for line in whole.splitlines() if words is None or type(error).__name__ in EXCERPTS else [whole]:
            remark(line)
        sys.exit(EXIT_USAGE if type(error).__name__ in USAGE_ERRORS else EXIT_FAILED)
    finally:
        # Skips the last garbage collection of the interpreter, which takes a second if torch is loaded.
        gc.freeze()


def _words(error: Exception) -> str | None:
    """The message of our own error, or of an OSError with its file first; None for other errors."""
    if type(error).__module__.partition(".")[0] in OURS:
        return str(error)
    if not isinstance(error, OSError):
        return None
    if isinstance(error, FileExistsError) and error.filename is not None:
        return f"{error.filename} exists already; name another file, or remove it first"
    return str(error) if error.filename is None else f"{error.filename}: {error.strerror}"


def _run() -> None:
    if sys.argv[1:2] == ["device"]:
        from muster.commands import device

        sys.exit(device.main(sys.argv[2:]))
    from typer import Abort
    from typer.exceptions import TyperException

    from muster.app import app

    try:
        code = app(standalone_mode=False)
    except Abort:
        remark("error: given up")
        sys.exit(EXIT_FAILED)
    except TyperException as error:
        _refuse(error)
    sys.exit(code or 0)


def _refuse(error: Any) -> NoReturn:
    """End a command that was typed wrong: one line, and where to read on; a group without a command shows its help."""
    words, context = in_our_words(error.format_message().rstrip(".")), error.ctx
    if context is not None and words == context.get_help().rstrip("."):
        for line in context.get_help().splitlines():
            remark(line)
    else:
        link = " See" if words.endswith("?") else "; see"
        remark(f"error: {words}" + (f"{link} `{context.command_path} --help`" if context else ""))
    sys.exit(EXIT_USAGE)
