"""`muster audit`: the log of what operators, tokens and devices did, and the proof that it is whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from muster.commands.stores import Blobs, Database, HeadFile, Remote, open_store
from muster.output import Json, at_utc, emit, show_fields, show_table

audit_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and verify the audit log.\n\n"
    "Run it where the coordinator's files are, or over HTTP with --coordinator and a token in MUSTER_TOKEN.",
)
_PAGE = 1000


@audit_app.command()
def show(
    last: Annotated[int, typer.Option(min=1, max=_PAGE, help="How many entries, from the end.")] = 100,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Show the last entries, oldest first."""
    with open_store(db, blobs, coordinator) as store:
        found = store.audit(limit=last)
    if json:
        emit([asdict(one) for one in found])
    else:
        rows = [(one.number, at_utc(one.at), one.actor, one.action, one.subject, one.detail) for one in found]
        show_table(("entry", "when", "who", "did", "to", "more"), rows)


@audit_app.command()
def verify(
    head_file: HeadFile = None,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """Check every entry, and name the first that is not as written.

    Each entry is chained to the one before. A log that was cut off at its end, or made anew as a whole, is only found
    with --head-file. Keep that file where those who could write the database cannot. The exit code is 1 for a broken
    log.
    """
    from coordinator.rules.audit import Head, whole_log
    from coordinator.rules.audit import verify as check

    saved = Head.parse(head_file.read_text()) if head_file is not None and head_file.exists() else None
    with open_store(db, blobs, coordinator) as store:
        head = check(whole_log(store.audit), saved)
    if head_file is not None:
        head_file.write_text(f"{head}\n")
    facts = {"entries": head.number, "head": str(head)}
    if json:
        emit(facts)
    else:
        show_fields(facts)
