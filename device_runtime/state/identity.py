"""A device's identity: two private keys in the state folder that say nothing about the device."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_runtime.errors import StateError
from device_runtime.state.folder import write_whole

KEY_BYTES = 32


def device_key(folder: Path) -> Ed25519PrivateKey:
    """The key that this installation signs its requests with, made at the first call.

    Only for the holder of the state folder. A file that holds no key is replaced, as nobody is there to repair it: to a
    coordinator that is another device. Raises StateError.
    """
    return _kept(folder / "device-key")


def secagg_key(folder: Path) -> Ed25519PrivateKey:
    """The key that this installation takes part in secure aggregation with. As `device_key`."""
    return _kept(folder / "secagg-key")


def _kept(path: Path) -> Ed25519PrivateKey:
    """The key whose bytes a file holds in hex."""
    try:
        kept = path.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        kept = ""
    except OSError as error:
        raise StateError(f"the {path.name} file cannot be read", f"{path}: {error}") from error
    if not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", kept):
        kept = secrets.token_hex(KEY_BYTES)
        write_whole(path, f"{kept}\n".encode())
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(kept))
