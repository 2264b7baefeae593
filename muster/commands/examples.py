"""`muster device examples`: a device's example store."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from muster.commands.arguments import Group, at_least_one
from muster.plain import emit, show_fields, show_table

if TYPE_CHECKING:
    from fedcore.plan import Field


def add_examples(top: Group) -> None:
    """Add the group of these commands."""
    group = top.group("examples", "Examples of a device, in a store that stays on this machine.")
    importing = group.command(import_, "import")
    importing.add_argument("file", type=Path, metavar="FILE", help="A file *.npz, *.jsonl or *.csv.")
    importing.add_argument("--collection", default="default", metavar="NAME", help="The one to add to.  [%(default)s]")
    importing.add_argument(
        "--field",
        type=_field,
        action="append",
        metavar="NAME:DTYPE[:SHAPE[:HIGH]]",
        help="A field, like x:float32:28x28 or y:int64::10.",
    )
    keeping = group.command(keep)
    keeping.add_argument("--collection", default="default", metavar="NAME", help="It must be there.  [%(default)s]")
    keeping.add_argument("--max-age-s", type=float, metavar="S", help="Keep no example for longer, in seconds.")
    keeping.add_argument("--max-count", type=at_least_one, metavar="N", help="Keep no more examples than this.")
    keeping.add_argument(
        "--max-bytes", type=at_least_one, metavar="N", help="Keep no more bytes of examples than this."
    )
    deleting = group.command(delete)
    deleting.add_argument("--collection", metavar="NAME", help="Delete this collection.")
    deleting.add_argument(
        "--before", type=_time, metavar="TIME", help="Delete older examples, in local time: 2026-01-31[T12:00[:00]]."
    )
    deleting.add_argument("--all", action="store_true", help="Delete all collections.")
    for command in (importing, group.command(list_, "list"), keeping, deleting):
        command.add_argument("--store", type=Path, required=True, metavar="DIR", help="The folder of the store.")


def import_(options: argparse.Namespace) -> None:
    """Add all examples of a file, or none if one is refused. The store is made when missing.

    A new collection needs a --field for each of its fields, unless the file is an .npz.
    """
    from device_runtime.examples import ExampleStore, import_file

    fields = tuple(options.field or ()) or None
    done = import_file(ExampleStore.open(options.store), options.file, options.collection, fields)
    if options.json:
        return emit(done)
    aside = {"damaged store kept as": done.put_aside} if done.put_aside else {}
    return show_fields({"added": done.added, "removed by retention": done.removed, **aside})


def list_(options: argparse.Namespace) -> None:
    """Collections: how many examples, how large, how old, how long they are kept."""
    import msgspec

    from device_runtime.examples import ExampleStore
    from device_runtime.examples.database import words
    from device_runtime.examples.store import FILE

    holdings = ExampleStore(options.store / FILE).holdings()
    if options.json:
        return emit({"collections": holdings})
    columns = ["collection", "examples", "bytes", "oldest", "newest", "fields", "kept at most"]
    rows = [
        (
            h.collection,
            h.examples,
            h.bytes,
            _day(h.oldest),
            _day(h.newest),
            words(h.fields),
            msgspec.structs.asdict(h.retention),
        )
        for h in holdings
    ]
    return show_table(columns, rows)


def keep(options: argparse.Namespace) -> None:
    """Set how long a collection keeps its examples. The rest goes now, and after every append; oldest first.

    A limit that is not given is none: without any option, all examples are kept.
    """
    from device_runtime.examples import ExampleStore, Retention
    from device_runtime.examples.store import FILE

    retention = Retention(max_age_s=options.max_age_s, max_count=options.max_count, max_bytes=options.max_bytes)
    removed = ExampleStore(options.store / FILE).retain(options.collection, retention)
    if options.json:
        return emit({"collection": options.collection, "retention": retention, "removed": removed})
    return show_fields({"removed": removed})


def delete(options: argparse.Namespace) -> None:
    """Delete a collection, or examples older than a time, in one collection or all. The bytes are overwritten.

    Give --collection, --before, or both; or only --all.
    """
    from device_runtime.examples import ExampleStore
    from device_runtime.examples.store import FILE

    if options.all == (options.collection is not None or options.before is not None):
        options.usage("give --collection, --before, or both; or only --all")
    before = None if options.before is None else options.before.timestamp()
    removed = ExampleStore(options.store / FILE).delete(options.collection, before)
    return emit({"removed": removed}) if options.json else show_fields({"removed": removed})


def _field(text: str) -> Field:
    """`name:dtype[:shape[:high]]` as a field. Raises argparse.ArgumentTypeError."""
    from device_runtime.examples.database import to_field

    name, dtype, shape, high, *more = [*text.split(":"), "", "", ""][: max(4, text.count(":") + 1)]
    try:
        sizes = [int(size) for size in shape.split("x")] if shape else []
        raw = {"name": name, "dtype": dtype, "shape": sizes, "high": int(high) if high else None}
        if more:
            raise ValueError(f"{len(more)} parts too many")
        return to_field(raw)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like x:float32:28x28 or y:int64::10: {error}") from error


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2026-01-31 or 2026-01-31T12:00") from error


def _day(at: float | None) -> str | None:
    return None if at is None else f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M}"
