"""`muster audit`: the log of what operators, tokens and devices did, and the proof that it is whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.stores import HeadFile, with_store
from muster.output import Json, answer, at_utc, emit, show_table

if TYPE_CHECKING:
    from coordinator.operations import TaskStore

audit_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and verify the audit log.\n\n"
    "Run it where the coordinator's files are, or over HTTP with --coordinator and a token in MUSTER_TOKEN.",
)
_PAGE = 1000


@audit_app.command()
@with_store
def show(
    *,
    last: Annotated[int, typer.Option(min=1, max=_PAGE, help="How many entries, from the end.")] = 100,
    store: TaskStore,
    json: Json = False,
) -> None:
    """Show the last entries, oldest first."""
    log = store.audit(limit=last)
    if json:
        emit([asdict(entry) for entry in log])
    else:
        rows = [
            (entry.number, at_utc(entry.at), entry.actor, entry.action, entry.subject, entry.detail) for entry in log
        ]
        show_table(("entry", "when", "who", "did", "to", "more"), rows)


@audit_app.command()
@with_store
def verify(*, head_file: HeadFile = None, store: TaskStore, json: Json = False) -> None:
    """Check every entry, and name the first that is not as written.

    Each entry is chained to the one before. Only --head-file shows that a log was cut off at its end, or made anew as a
    whole. Keep that file out of reach of everyone who can write to the database. The exit code is 1 for a broken log.
    """
    from coordinator.rules.audit import Head, whole_log
    from coordinator.rules.audit import verify as check

    saved = Head.parse(head_file.read_text()) if head_file is not None and head_file.exists() else None
    head = check(whole_log(store.audit), saved)
    if head_file is not None:
        head_file.write_text(f"{head}\n")
    answer({"entries": head.number, "head": str(head)}, json)
