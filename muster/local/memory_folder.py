"""The folder for files that live as long as one process: in memory, where there is room."""

from __future__ import annotations

import os
import shutil

IN_MEMORY, LEAST_FREE_BYTES = "/dev/shm", 1 << 29  # noqa: S108  # whoever uses it makes a folder of its own inside


def memory_folder() -> str | None:
    """The machine's folder in memory, if half a gigabyte is free there; None for the usual folder of temporary files.

    What databases sync then costs no time. A TMPDIR that the user set is respected: with one it is None too.
    """
    if os.environ.get("TMPDIR"):
        return None
    try:
        roomy = shutil.disk_usage(IN_MEMORY).free > LEAST_FREE_BYTES and os.access(IN_MEMORY, os.W_OK)
    except OSError:
        return None
    return IN_MEMORY if roomy else None
