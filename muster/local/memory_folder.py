"""The folder for files of one process: in memory, if there is room."""

from __future__ import annotations

import os
import shutil

IN_MEMORY, LEAST_FREE_BYTES = "/dev/shm", 1 << 29  # noqa: S108  # each use makes a folder of its own in it


def memory_folder() -> str | None:
    """The folder in memory, if half a gigabyte is free there; else None, for the usual folder of temporary files.

    Databases sync there in no time. If the user set TMPDIR, it is None too.
    """
    if os.environ.get("TMPDIR"):
        return None
    try:
        roomy = shutil.disk_usage(IN_MEMORY).free > LEAST_FREE_BYTES and os.access(IN_MEMORY, os.W_OK)
    except OSError:
        return None
    return IN_MEMORY if roomy else None
