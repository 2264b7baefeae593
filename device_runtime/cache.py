"""Plans and graphs by digest, kept between rounds.

Checkpoints do not come here: they are large, differ every round, and a device rarely works on the same round twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from device_runtime.errors import StateError
from device_runtime.state import sweep_partials, write_whole
from fedcore.errors import DigestMismatch
from fedcore.plan import BlobRef


class BlobCache:
    """Blobs in a folder, each in a file of its digest's name. Only for the holder of the state folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sweep_partials(folder)

    def get(self, ref: BlobRef, fetch: Callable[[BlobRef], bytes]) -> bytes:
        """The blob's bytes, checked on every read; `fetch`, which must check them too, is asked when they are not here.

        A damaged file counts as absent. Raises StateError and what `fetch` raises.
        """
        path = self._folder / ref.sha256
        try:
            return ref.check(path.read_bytes())
        except (FileNotFoundError, DigestMismatch):
            data = fetch(ref)
        except (OSError, ValueError) as error:
            raise StateError("a cached blob cannot be read", f"{path}: {error}") from error
        write_whole(path, data, durable=False)
        return data
