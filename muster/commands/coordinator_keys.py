"""`muster coordinator keys`: the server's key, which signs invitations to secure rounds."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.stores import Database, located
from muster.output import Json, answer

if TYPE_CHECKING:
    from coordinator.keys import Keys

keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show or rotate the server's key.")


@keys_app.command()
def show(db: Database = None, json: Json = False) -> None:
    """Show the server's public key, after a check that file and database agree, and the lineage key.

    The lineage key signs checkpoints of released tasks, and privacy certificates.
    """
    from coordinator.keys import Keys
    from coordinator.store.database import Database as Store

    settings = located(db)
    with closing(Store(settings.database, create=False)) as database:
        _show(Keys.open(settings.keys_file, database), settings.keys_file, json)


@keys_app.command()
def rotate(
    db: Database = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the successor to this file, which replaces the old one later.")
    ] = None,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost",
            help="A file is lost: make an unrelated key, which devices that know the lost one refuse.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Give the server's key a successor.

    The old key signs the new one, which takes its place.

    Running coordinators use it within a second, and devices follow by themselves. Make a new backup afterwards. With
    --out nothing changes yet: keep that file offline, for the day on which the key leaks or is lost.

    The lineage key has no successor. With --lost a new one, or the one in the file, replaces a lost one. Tasks whose
    releases name the lost one are paused until it is back.
    """
    from coordinator.keys import rotate as put_successor
    from coordinator.keys import start_anew
    from coordinator.store.database import Database as Store

    if lost and out is not None:
        raise typer.BadParameter("a lost key signs no successor", param_hint="--out")
    settings = located(db)
    with closing(Store(settings.database, create=False)) as database:
        path = settings.keys_file
        keys = start_anew(path, database) if lost else put_successor(path, database, out)
        _show(keys, path, json)


def _show(keys: Keys, path: Path, json: bool) -> None:
    from coordinator.lineage import lineage_file, lineage_key
    from fedcore.signing import key_text

    key = keys.server
    text = key_text(key.public)
    succeeded = [old.hex() for old in key.succession.keys[:-1]]
    facts = {
        "file": str(path),
        "key": key.public.hex(),
        "text": text,
        "lineage": lineage_key(path).signer if lineage_file(path).exists() else None,
        "succeeds": succeeded,
    }
    answer(facts if json else facts | {"succeeds": ", ".join(succeeded) or "no other"}, json)
