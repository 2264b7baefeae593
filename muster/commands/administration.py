"""`muster coordinator keys`, `devices` and `alerts`, and `muster audit`: what administrators look at."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.stores import Blobs, Database, HeadFile, Remote, located, open_store, with_store
from muster.output import Json, answer, at_utc, emit, show_table

if TYPE_CHECKING:
    from coordinator.keys import Keys
    from coordinator.operations import TaskStore
    from coordinator.rules.alerts import Alert
    from coordinator.rules.entities import Device


keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show or rotate the server's key.")


@keys_app.command("show")
def show_key(db: Database = None, json: Json = False) -> None:
    """Show the server's public key, after a check that file and database agree, and the lineage key.

    The lineage key signs checkpoints of released tasks, and privacy certificates.
    """
    from coordinator.keys import Keys
    from coordinator.store.database import Database as Store

    settings = located(db)
    with closing(Store(settings.database, create=False)) as database:
        _show_key(Keys.open(settings.keys_file, database), settings.keys_file, json)


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
    from coordinator.keys import rotate as put_successor, start_anew
    from coordinator.store.database import Database as Store

    if lost and out is not None:
        raise typer.BadParameter("a lost key signs no successor", param_hint="--out")
    settings = located(db)
    with closing(Store(settings.database, create=False)) as database:
        path = settings.keys_file
        keys = start_anew(path, database) if lost else put_successor(path, database, out)
        _show_key(keys, path, json)


def _show_key(keys: Keys, path: Path, json: bool) -> None:
    from coordinator.keys import lineage_file, lineage_key
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


devices_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, revoke and allow devices.\n\n"
    "Run it where the coordinator's files are, or over HTTP with --coordinator and a token in MUSTER_TOKEN.",
)
DeviceId = Annotated[
    str, typer.Argument(metavar="DEVICE", help="The device's id, from this list or from `muster device log` there.")
]


@devices_app.command("list")
@with_store
def list_devices(
    *,
    revoked: Annotated[bool, typer.Option("--revoked", help="Only revoked ones, the last revoked first.")] = False,
    last: Annotated[int, typer.Option(min=1, max=1000, help="Number of devices, newest first.")] = 100,
    store: TaskStore,
    json: Json = False,
) -> None:
    """List devices, the last enrolled first."""
    devices = store.devices(last, revoked=revoked)
    if json:
        emit([asdict(device) for device in devices])
    else:
        rows = [(device.id, device.attestation, at_utc(device.enrolled_at), _state(device)) for device in devices]
        show_table(("device", "attestation", "enrolled", "state"), rows)


@devices_app.command()
@with_store
def revoke(*, device: DeviceId, store: TaskStore, json: Json = False) -> None:
    """Refuse a device from now on, at every coordinator on the database.

    Its sessions end within seconds; its earlier reports stay counted.
    """
    _show_device(store.revoke_device(device), json)


@devices_app.command()
@with_store
def allow(*, device: DeviceId, store: TaskStore, json: Json = False) -> None:
    """Take a revoked device back."""
    _show_device(store.allow_device(device), json)


def _show_device(device: Device, json: bool) -> None:
    answer(asdict(device) if json else {"device": device.id, "state": _state(device)}, json)


def _state(device: Device) -> str:
    return "good" if device.revoked_at is None else "revoked"


def alerts(
    last: Annotated[int, typer.Option(min=1, max=1000, help="Number of alerts, open ones first.")] = 100,
    test: Annotated[
        bool, typer.Option("--test", help="Send the webhook one signed test event, and list nothing.")
    ] = False,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """List alerts: open ones, then cleared ones, the newest first.

    A coordinator raises and clears them; the first line says so if none looks. Texts are of when they were raised:
    `muster task list` says how tasks are now.

    --test sends from the coordinator with --coordinator, and else from here, by the settings of this shell. The exit
    code is 1 when the webhook does not take it.
    """
    if test:
        _test(db, coordinator)
        answer({"delivered": True}, json)
        return
    with open_store(db, blobs, coordinator) as store:
        listed = store.alerts(last)
    if json:
        emit([asdict(alert) for alert in listed])
    else:
        show_table(("alert", "task", "raised", "cleared", "what", "what to do"), [_row(alert) for alert in listed])


def _test(db: str | None, coordinator: str | None) -> None:
    from coordinator.driver.watch import Webhook, send_trial
    from muster.remote import RemoteStore

    if coordinator is None:
        settings = located(db)
        send_trial(Webhook.of(settings.alert_webhook, settings.alert_webhook_secret_file))
        return
    with RemoteStore(coordinator, os.environ.get("MUSTER_TOKEN")) as remote:
        remote.test_alerts()


def _row(alert: Alert) -> tuple[str, ...]:
    cleared = "" if alert.cleared_at is None else at_utc(alert.cleared_at)
    return alert.kind, alert.task or "", at_utc(alert.raised_at), cleared, alert.text, alert.remedy


audit_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and verify the audit log.\n\n"
    "Run it where the coordinator's files are, or over HTTP with --coordinator and a token in MUSTER_TOKEN.",
)
_PAGE = 1000


@audit_app.command("show")
@with_store
def show_log(
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
    from coordinator.rules.audit import Head, verify as check, whole_log

    saved = Head.parse(head_file.read_text()) if head_file is not None and head_file.exists() else None
    head = check(whole_log(store.audit), saved)
    if head_file is not None:
        head_file.write_text(f"{head}\n")
    answer({"entries": head.number, "head": str(head)}, json)
