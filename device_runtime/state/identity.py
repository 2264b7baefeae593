"""A device's identity: two private keys in the state folder that say nothing about the device."""

from __future__ import annotations

import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_runtime.errors import KeyUnavailable, SealBroken, StateError
from device_runtime.state.folder import write_whole
from device_runtime.state.sealing import Sealer

KEY_BYTES = 32


def device_key(folder: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key that this installation signs its requests with, made at the first call.

    Only for the holder of the state folder. Raises StateError, or KeyUnavailable when the sealing key cannot be had or
    does not open the file: the file stays as it is, since the right sealing key may come back.
    """
    return _kept(folder / "device-key", sealer)


def secagg_key(folder: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key that this installation takes part in secure aggregation with. As `device_key`."""
    return _kept(folder / "secagg-key", sealer)


def _kept(path: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key whose bytes a file holds, sealed."""
    try:
        key_bytes = sealer.open(path.name, path.read_bytes())
    except FileNotFoundError:
        key_bytes = secrets.token_bytes(KEY_BYTES)
        write_whole(path, sealer.seal(path.name, key_bytes))
    except OSError as error:
        raise StateError(f"the {path.name} file cannot be read", f"{path}: {error}") from error
    except SealBroken as error:
        raise KeyUnavailable(
            f"the {path.name} file does not open: put back the sealing key that it was sealed under, or remove the "
            "file, after which this is a new device",
            str(path),
        ) from error
    return Ed25519PrivateKey.from_private_bytes(key_bytes)
