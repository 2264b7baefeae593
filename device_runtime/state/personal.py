"""The personal parameters of models: one sealed file for each model, which opens for one version only."""

from __future__ import annotations

import hashlib
from pathlib import Path

from device_runtime.errors import SealBroken, StateError
from device_runtime.state.folder import write_whole
from device_runtime.state.sealing import Sealer
from fedcore.private_files import PARTIAL, sync_folder
from fedcore.release import Signed

SUFFIX = ".personal"


class PersonalStore:
    """The personal parameters of one model of one population. Every method raises StateError."""

    def __init__(self, folder: Path, sealer: Sealer, population: str, name: str) -> None:
        named = hashlib.sha256(f"{population}\n{name}".encode()).hexdigest()
        self._path = folder / f"{named}{SUFFIX}"
        self._sealer = sealer

    def get(self, release: Signed) -> bytes | None:
        """The parameters that were made from this version, as a checkpoint; None without.

        None too where they belong to another version, or the file was changed. Raises KeyUnavailable.
        """
        try:
            return self._sealer.open(_what(release), self._path.read_bytes())
        except (FileNotFoundError, SealBroken):
            return None
        except OSError as error:
            raise StateError("personal parameters cannot be read", str(error)) from error

    def put(self, release: Signed, parameters: bytes) -> None:
        """Store the parameters that were made from a version, in the place of any. Raises KeyUnavailable."""
        self._delete(f"{self._path.name}.*{PARTIAL}")
        write_whole(self._path, self._sealer.seal(_what(release), parameters))

    def drop(self) -> bool:
        """Delete what is stored; whether there was anything. It stays deleted after a power cut."""
        stored = self._path.exists()
        self._delete(f"{self._path.name}*")  # and what a killed process left half written
        return stored

    def _delete(self, names: str) -> None:
        try:
            for path in self._path.parent.glob(names):
                path.unlink()
            sync_folder(self._path.parent)
        except OSError as error:
            raise StateError("personal parameters cannot be deleted", str(error)) from error


def _what(release: Signed) -> str:
    return f"personal parameters from model release {release.digest}"
