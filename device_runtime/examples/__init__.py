"""Local examples: an `.npz` file, or the SQLite store that a host application appends to. See docs/device.md."""

from __future__ import annotations

from pathlib import Path

from device_runtime.examples.database import Collection, Retention
from device_runtime.examples.source import ExampleSource, NpzFile, invalid
from device_runtime.examples.store import FILE, Appended, ExampleStore, Holding, import_file
from device_runtime.state.folder import KeyStore

__all__ = [
    "Appended",
    "Collection",
    "ExampleSource",
    "ExampleStore",
    "Holding",
    "NpzFile",
    "Retention",
    "import_file",
    "open_examples",
]

SQLITE_MAGIC = b"SQLite format 3\0"
ZIP_MAGIC = b"PK"


def open_examples(path: Path, keystore: KeyStore | None = None) -> ExampleSource:
    """The source at `path`: an `.npz` file, or an example store's folder or file. Its first bytes tell which.

    keystore: holds the key that seals an example store; None means a file beside the store.

    Raises ExamplesError when it is missing, unreadable or of another kind.
    """
    if (path / FILE).is_file():
        return ExampleStore(path / FILE, keystore=keystore)
    try:
        with path.open("rb") as file:
            start = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        why = "a folder without an example store" if path.is_dir() else error.strerror
        raise invalid("the examples cannot be read", f"{path}: {why}") from error
    if start == SQLITE_MAGIC:
        return ExampleStore(path, keystore=keystore)
    if start.startswith(ZIP_MAGIC):
        return NpzFile(path)
    raise invalid("the examples are neither an .npz file nor an example store", str(path))
