"""Arrays of a data set, read from disk, with errors that name the file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.errors import reason
from simulator.errors import DatasetError


def read_npz(path: Path, names: Sequence[str] | None = None) -> dict[str, NDArray[np.generic]]:
    """The named arrays of an npz file, or all of them, never unpickled. Raises DatasetError."""
    if not path.is_file():
        raise DatasetError(f"{path} does not exist")
    if not zipfile.is_zipfile(path):  # which NumPy would offer to unpickle
        raise DatasetError(f"{path} is not the data set it should be: it is no npz file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in names or archive.files}
    except Exception as error:  # malformed archives raise many kinds
        # NumPy's words about objects say how to unpickle them.
        words = "it holds objects, not numbers" if "allow_pickle" in str(error) else reason(error)
        raise DatasetError(f"{path} is not the data set it should be: {words}") from error
    others = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    if others:
        raise DatasetError(f"{path} is not the data set it should be: {others[0]!r} is no array")
    return arrays
