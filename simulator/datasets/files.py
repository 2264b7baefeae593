"""Arrays of a data set, read from disk, with errors that name the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.errors import reason
from simulator.errors import DatasetError


def read_npz(path: Path, names: Sequence[str] | None = None) -> dict[str, NDArray[np.generic]]:
    """The named arrays of an npz file, or all of them, never unpickled. Raises DatasetError."""
    if not path.is_file():
        raise DatasetError(f"{path} does not exist; --data must name the folder that holds it")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in names or archive.files}
    except Exception as error:  # malformed archives raise many kinds
        raise DatasetError(f"{path} is not the data set it should be: {reason(error)}") from error
    others = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    if others:
        raise DatasetError(f"{path} is not the data set it should be: {others[0]!r} is no array")
    return arrays
