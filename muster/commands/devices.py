"""`muster coordinator devices`: the devices that enrolled, and those that the coordinator refuses."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.stores import Blobs, Database, Remote, open_store
from muster.output import Json, at_utc, emit, show_fields, show_table

if TYPE_CHECKING:
    from coordinator.rules.entities import Device

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
def list_devices(
    *,
    revoked: Annotated[
        bool, typer.Option("--revoked", help="Only those that are revoked, the last one first.")
    ] = False,
    last: Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest first.")] = 100,
    db: Database = None,
    blobs: Blobs = None,
    coordinator: Remote = None,
    json: Json = False,
) -> None:
    """List the devices that enrolled last."""
    with open_store(db, blobs, coordinator) as store:
        found = store.devices(last, revoked=revoked)
    if json:
        emit([asdict(one) for one in found])
    else:
        rows = [(one.id, one.attestation, at_utc(one.enrolled_at), _state(one)) for one in found]
        show_table(("device", "attestation", "enrolled", "state"), rows)


@devices_app.command()
def revoke(
    device: DeviceId, db: Database = None, blobs: Blobs = None, coordinator: Remote = None, json: Json = False
) -> None:
    """Refuse a device from now on, at every coordinator on the database.

    What it waits for and works on ends within seconds; what it reported before stays counted.
    """
    with open_store(db, blobs, coordinator) as store:
        _show(store.revoke_device(device), json)


@devices_app.command()
def allow(
    device: DeviceId, db: Database = None, blobs: Blobs = None, coordinator: Remote = None, json: Json = False
) -> None:
    """Take a revoked device back."""
    with open_store(db, blobs, coordinator) as store:
        _show(store.allow_device(device), json)


def _show(device: Device, json: bool) -> None:
    if json:
        emit(asdict(device))
    else:
        show_fields({"device": device.id, "state": _state(device)})


def _state(device: Device) -> str:
    return "good" if device.revoked_at is None else "revoked"
