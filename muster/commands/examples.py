"""`muster device examples`: what is in a device's example store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.output import Json, emit, show_fields, show_table

if TYPE_CHECKING:
    from fedcore.plan import Field

examples_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Examples of a device, in a store that stays on this machine."
)
TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
Store = Annotated[Path, typer.Option(help="The folder of the example store.")]


@examples_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file *.npz, *.jsonl or *.csv.")],
    store: Store,
    collection: Annotated[str, typer.Option(help="The collection to add to.")] = "default",
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:DTYPE[:SHAPE[:HIGH]]", help="A field, like x:float32:28x28 or y:int64::10."),
    ] = None,
    json: Json = False,
) -> None:
    """Add all examples of a file, or none if one is refused. The store is made when missing.

    A new collection needs a --field for each of its fields, unless the file is an .npz.
    """
    from device_runtime.examples import ExampleStore, import_file

    done = import_file(ExampleStore.open(store), file, collection, _fields(field or []) or None)
    if json:
        return emit(done)
    aside = {"damaged store kept as": done.put_aside} if done.put_aside else {}
    return show_fields({"added": done.added, "removed by retention": done.removed, **aside})


@examples_app.command("list")
def list_(store: Store, json: Json = False) -> None:
    """Collections: how many examples, how large, how old, how long they are kept."""
    import msgspec

    from device_runtime.examples import ExampleStore
    from device_runtime.examples.collection import words
    from device_runtime.examples.store import FILE

    holdings = ExampleStore(store / FILE).holdings()
    if json:
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


@examples_app.command()
def keep(
    store: Store,
    collection: Annotated[str, typer.Option(help="The collection, which must be there.")] = "default",
    max_age_s: Annotated[float | None, typer.Option(help="Keep no example for longer, in seconds.")] = None,
    max_count: Annotated[int | None, typer.Option(min=1, help="Keep no more examples than this.")] = None,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Keep no more bytes of examples than this.")] = None,
    json: Json = False,
) -> None:
    """Set how long a collection keeps its examples. What is over that goes now, and after every append; oldest first.

    A limit that is not given is none: without any option, all examples are kept.
    """
    from device_runtime.examples import ExampleStore, Retention
    from device_runtime.examples.store import FILE

    retention = Retention(max_age_s=max_age_s, max_count=max_count, max_bytes=max_bytes)
    removed = ExampleStore(store / FILE).retain(collection, retention)
    if json:
        return emit({"collection": collection, "retention": retention, "removed": removed})
    return show_fields({"removed": removed})


@examples_app.command()
def delete(
    store: Store,
    collection: Annotated[str | None, typer.Option(help="Delete this collection.")] = None,
    before: Annotated[
        datetime | None, typer.Option(help="Delete what is older than this, in local time.", formats=TIMES)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all collections.")] = False,
    json: Json = False,
) -> None:
    """Delete a collection, or what is older than a time, in one collection or all. The bytes are overwritten."""
    from device_runtime.examples import ExampleStore
    from device_runtime.examples.store import FILE

    if everything == (collection is not None or before is not None):
        raise typer.BadParameter("give --collection, --before, or both; or --all alone")
    removed = ExampleStore(store / FILE).delete(collection, None if before is None else before.timestamp())
    return emit({"removed": removed}) if json else show_fields({"removed": removed})


def _fields(given: Sequence[str]) -> tuple[Field, ...]:
    """`name:dtype[:shape[:high]]` as fields. Raises typer.BadParameter."""
    import msgspec

    from fedcore.plan import Field

    fields = []
    for text in given:
        name, dtype, shape, high, *more = [*text.split(":"), "", "", ""][: max(4, text.count(":") + 1)]
        try:
            sizes = [int(size) for size in shape.split("x")] if shape else []
            raw = {"name": name, "dtype": dtype, "shape": sizes, "high": int(high) if high else None}
            if more:
                raise ValueError(f"{len(more)} parts too many")
            fields.append(msgspec.convert(raw, Field))
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is not like x:float32:28x28 or y:int64::10: {error}") from error
    return tuple(fields)


def _day(at: float | None) -> str | None:
    return None if at is None else f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M}"
