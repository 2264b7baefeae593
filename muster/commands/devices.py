"""`muster coordinator devices`: the devices that enrolled, and those that were revoked."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.stores import with_store
from muster.output import Json, answer, at_utc, emit, show_table

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
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
    _show(store.revoke_device(device), json)


@devices_app.command()
@with_store
def allow(*, device: DeviceId, store: TaskStore, json: Json = False) -> None:
    """Take a revoked device back."""
    _show(store.allow_device(device), json)


def _show(device: Device, json: bool) -> None:
    answer(asdict(device) if json else {"device": device.id, "state": _state(device)}, json)


def _state(device: Device) -> str:
    return "good" if device.revoked_at is None else "revoked"
