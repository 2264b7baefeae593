"""Local examples: an `.npz` file, or the SQLite store that a host application appends to."""

from __future__ import annotations

from pathlib import Path

from device_runtime.examples.npz import NpzFile
from device_runtime.examples.source import ExampleSource, invalid
from device_runtime.examples.store import ExampleStore

__all__ = ["ExampleSource", "ExampleStore", "NpzFile", "open_examples"]

SQLITE_MAGIC = b"SQLite format 3\0"
ZIP_MAGIC = b"PK"


def open_examples(path: Path) -> ExampleSource:
    """The source at `path`, recognised by its first bytes: an `.npz` file or an example store.

    Raises ExamplesError when it is missing, unreadable or of another kind.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise invalid("the examples cannot be read", f"{path}: {error}") from error
    if start == SQLITE_MAGIC:
        return ExampleStore(path)
    if start.startswith(ZIP_MAGIC):
        return NpzFile(path)
    raise invalid("the examples are neither an .npz file nor an example store", str(path))
