"""Who a device is to a coordinator: a random id, kept in the state folder, that says nothing about the device."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from device_runtime.errors import StateError
from device_runtime.state import write_whole


def device_id(folder: Path) -> str:
    """The id of this installation, 16 bytes in hex, made at the first call. Only for the holder of the state folder.

    A file that holds no id is replaced: nobody is there to repair it. Raises StateError.
    """
    path = folder / "device-id"
    try:
        kept = path.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        kept = ""
    except OSError as error:
        raise StateError("the device id cannot be read", f"{path}: {error}") from error
    if re.fullmatch(r"[0-9a-f]{32}", kept):
        return kept
    made = secrets.token_hex(16)
    write_whole(path, f"{made}\n".encode())
    return made
