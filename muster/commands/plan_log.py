"""`muster plan log`: the log of releases that a coordinator showed to devices, and the proof that it only grew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from muster.commands.stores import Blobs, Database, HeadFile, Remote, open_store
from muster.output import Json, emit, show_fields, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedcore.release import Signed, TreeHead


def log(
    head_file: HeadFile = None,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Show and verify the log of releases for secure rounds.

    Every signature is checked, and the root of the log computed. With --head-file the log must be the old one with more
    at its end. A head that a device was shown can be compared in the same way. The exit code is 1 for a broken log.
    """
    from fedcore.release import TreeHead, decode_head
    from fedcore.signing import verified_release

    saved = decode_head(head_file.read_text()) if head_file is not None and head_file.exists() else None
    with open_store(db, blobs, coordinator) as store:
        found = store.releases()
    releases = [verified_release(one) for one in found]
    _demand_grown(found, saved)
    head = TreeHead(size=len(found), root=_root(found))
    if head_file is not None:
        head_file.write_bytes(msgspec.json.encode(head))
    if json:
        emit(
            {
                "head": head,
                "releases": [{"signer": one.signer, "digest": one.digest, "text": one.text} for one in found],
            }
        )
        return
    rows = [
        (place, one.population, one.plan[:12], one.counter, signed.signer)
        for place, (one, signed) in enumerate(zip(releases, found, strict=True))
    ]
    show_table(("place", "population", "plan", "counter", "signer"), rows)
    show_fields({"releases": head.size, "root": head.root})


def _demand_grown(found: Sequence[Signed], saved: TreeHead | None) -> None:
    """Raise BadRelease unless the log begins with what a head stood for."""
    from fedcore.errors import BadRelease

    if saved is not None and (len(found) < saved.size or _root(found[: saved.size]) != saved.root):
        raise BadRelease(
            f"the log has {len(found)} releases, and its first {saved.size} are not those of the saved head: it was "
            "changed, and devices were shown something else"
        )


def _root(found: Sequence[Signed]) -> str:
    """The root over these releases in hex; of zeros when there are none."""
    from secagg.merkle import EMPTY, Tree

    return (Tree([one.leaf for one in found]).root if found else EMPTY).hex()
