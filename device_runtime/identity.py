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
    return _kept(folder / "device-id", 16)


def secagg_key(folder: Path) -> bytes:
    """The Ed25519 private key, 32 bytes, that this installation takes part in secure aggregation with.

    Made and replaced as the id is; a new key is a new device to whoever enrols it. Raises StateError.
    """
    return bytes.fromhex(_kept(folder / "secagg-key", 32))


def _kept(path: Path, size: int) -> str:
    """The random bytes in a file, in hex."""
    try:
        kept = path.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        kept = ""
    except OSError as error:
        raise StateError(f"the {path.name} file cannot be read", f"{path}: {error}") from error
    if re.fullmatch(f"[0-9a-f]{{{2 * size}}}", kept):
        return kept
    made = secrets.token_hex(size)
    write_whole(path, f"{made}\n".encode())
    return made
