"""A device's identity: two private keys in the state folder that say nothing about the device."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_runtime.errors import SealBroken, StateError
from device_runtime.state.folder import write_whole
from device_runtime.state.sealing import Sealer

KEY_BYTES = 32


def device_key(folder: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key that this installation signs its requests with, made at the first call.

    Only for the holder of the state folder. A file that holds no key is replaced, as nobody is there to repair it: to a
    coordinator that is another device. Raises StateError or KeyUnavailable.
    """
    return _kept(folder / "device-key", sealer)


def secagg_key(folder: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key that this installation takes part in secure aggregation with. As `device_key`."""
    return _kept(folder / "secagg-key", sealer)


def _kept(path: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key whose bytes a file holds, sealed."""
    kept = b""
    try:
        with contextlib.suppress(FileNotFoundError, SealBroken):
            kept = sealer.open(path.name, path.read_bytes())
    except OSError as error:
        raise StateError(f"the {path.name} file cannot be read", f"{path}: {error}") from error
    if len(kept) != KEY_BYTES:
        kept = secrets.token_bytes(KEY_BYTES)
        write_whole(path, sealer.seal(path.name, kept))
    return Ed25519PrivateKey.from_private_bytes(kept)
