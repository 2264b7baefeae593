"""A device's identity: two random private keys in the state folder."""

from __future__ import annotations

import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_runtime.errors import KeyUnavailable, SealBroken, StateError
from device_runtime.state.folder import write_whole
from device_runtime.state.sealing import Sealer

KEY_BYTES = 32


def device_key(folder: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key that signs this installation's requests, made at the first call.

    Only for the holder of the state folder. Raises StateError, or KeyUnavailable when the sealing key is unavailable or
    does not open the file; the file stays, since the right sealing key may come back.
    """
    return _kept(folder / "device-key", sealer)


def secagg_key(folder: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key of this installation for secure aggregation. As `device_key`."""
    return _kept(folder / "secagg-key", sealer)


def _kept(path: Path, sealer: Sealer) -> Ed25519PrivateKey:
    """The key whose sealed bytes are in a file."""
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
