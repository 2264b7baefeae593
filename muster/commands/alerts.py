"""`muster coordinator alerts`: what needs an operator, and a try of the webhook that is told of it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.stores import Blobs, Database, Remote, located, open_store
from muster.output import Json, answer, at_utc, emit, show_table

if TYPE_CHECKING:
    from coordinator.rules.alerts import Alert


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
    from coordinator.webhook import Webhook, send_trial
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
