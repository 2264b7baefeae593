"""Alerts are evaluated and sent from here, beside the driver's thread, so that no round waits for them.

One replica does it: that which drives the oldest population, so the lease of that population is the lease of this.
Alerts of disks and of the TLS certificate are those of that process. While only time passes, nothing is written.

A webhook is sent signed JSON, to an address of the operators' choice. The header `Muster-Signature: t=SECONDS,v1=HEX`
has the time of the try and the HMAC-SHA256 of `SECONDS.BODY` under the secret. A try has a time limit in all; redirects
are not followed, the answer's body is not read, and no proxy of the environment is used. An address may hold secrets,
so messages name scheme, host and port only.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import shutil
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx2
import msgspec
from cryptography import x509

from coordinator.errors import WebhookFailed
from coordinator.monitoring import Metrics
from coordinator.rules import alerts
from coordinator.rules.states import TaskState
from coordinator.settings import Settings, place_of, read_secret
from coordinator.store.database import Database, sqlite_path
from coordinator.store.records.records import Records
from fedcore.release import decode_release

LIMIT_S = 10.0
"""The time limit of a try, from the look-up of the address to the status of the answer."""
HEADER = "Muster-Signature"


def signature(secret: bytes, at: int, body: bytes) -> str:
    """The value of the header for a body that is sent at a time, in seconds since 1970."""
    return f"t={at},v1={hmac.new(secret, b'%d.' % at + body, hashlib.sha256).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where alerts are sent, and the secret that signs them. limit_s: of a try."""

    url: str = field(repr=False)
    secret: bytes = field(repr=False)
    limit_s: float = LIMIT_S
    _trusted: ssl.SSLContext = field(default_factory=ssl.create_default_context, repr=False)

    @classmethod
    def of(cls, url: str | None, secret_file: Path | None) -> Webhook | None:
        """The webhook of these settings, which were checked; None where there is none."""
        return None if url is None or secret_file is None else cls(url, read_secret(secret_file))

    async def send(self, event: alerts.AlertEvent) -> None:
        """Send an event, once. Raises WebhookFailed unless the receiver answers 2xx in time."""
        body, at = msgspec.json.encode(event.body), int(time.time())
        headers = {"Content-Type": "application/json", HEADER: signature(self.secret, at, body)}
        client = httpx2.AsyncClient(trust_env=False, verify=self._trusted, timeout=None)  # the limit is of all in all
        place = place_of(self.url)
        try:
            async with (
                asyncio.timeout(self.limit_s),
                client,
                client.stream("POST", self.url, content=body, headers=headers) as answer,
            ):
                status = answer.status_code
        except TimeoutError as error:
            raise WebhookFailed(f"{place} did not answer within {self.limit_s:g} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise WebhookFailed(f"{place} cannot be reached: {type(error).__name__}") from error
        if not 200 <= status < 300:
            raise WebhookFailed(f"{place} answered {status}, not 2xx")


def send_trial(webhook: Webhook | None) -> None:
    """Send an event that says it is a test, from a thread without an event loop. Raises WebhookFailed."""
    if webhook is None:
        raise WebhookFailed("no webhook is set: set alert_webhook and alert_webhook_secret_file")
    text = "this is a test: events of alerts arrive"
    alert = alerts.Alert(id=secrets.token_hex(8), kind=alerts.AlertKind.TEST, text=text, raised_at=time.time())
    asyncio.run(webhook.send(alerts.AlertEvent(alert, cleared=False)))


T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_EVERY_S = 10.0
"""The interval between looks, and how long one tells of events."""
_KEPT_S = 90 * 86400.0
"""How long an alert that was cleared is kept."""
_MOST_EVENTS = 100
"""Events that are read at once."""
_LAST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""The last day that can be written: a release may name a later one."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 10.0, 900.0
"""The wait after a try that failed: doubled each time, up to the longest."""


@dataclass(slots=True)
class Watch:
    """Evaluates alerts where `replica` is to. tells: whether there is a webhook to be told."""

    database: Database
    settings: Settings
    replica: str
    tells: bool
    _absent: dict[str, float] = field(default_factory=dict)

    def look(self) -> bool:
        """Raise and clear what has changed, and delete old alerts; whether this replica is the one that does."""
        with self.database.reading() as records:
            if not self._is_watcher(records):
                self._absent = {}
                return False
            found, now = findings_of_tasks(records), records.at
            open_, old = records.alerts.open(), records.alerts.has_old(_KEPT_S)
        found += findings_here(self.settings, now)
        changes = alerts.alert_changes(open_, found, self._absent, now)
        if (changes.raised or changes.cleared or old) and not self._write(changes):
            return False
        self._absent = changes.absent
        return True

    def _is_watcher(self, records: Records) -> bool:
        watcher = records.alerts.watcher()
        return watcher is not None and watcher.replica == self.replica

    def _write(self, changes: alerts.AlertChanges) -> bool:
        """Whether this could be written: not once another replica has taken over."""
        with self.database.writing() as records:
            if not self._is_watcher(records):
                return False
            for finding in changes.raised:
                records.alerts.add(finding, due=self.tells)
            for alert in changes.cleared:
                records.alerts.clear(alert, due=self.tells)
            records.alerts.delete_old(_KEPT_S)
            return True


@dataclass(slots=True)
class AlertSender:
    """Tells a webhook of alerts, each at least once, in order. clock: seconds, with any origin."""

    database: Database
    webhook: Webhook
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _next: float = -float("inf")
    _told: str = ""
    """The last event that was taken: not sent again while that cannot be written."""

    async def deliver(self) -> None:
        """Send what is due until a try fails; then nothing for a while, which is longer each time.

        What a slow receiver, or many events, leave for the next look waits until that was taken: the lease may be gone.
        """
        began = self.clock()
        if began < self._next:
            return
        for event in await _in_thread(self._due):
            if event.id != self._told and not await self._tell(event):
                return
            await _in_thread(partial(self._delivered, event))
            if self.clock() - began >= _EVERY_S:
                return

    async def _tell(self, event: alerts.AlertEvent) -> bool:
        """Try to send an event; whether it was taken."""
        try:
            await self.webhook.send(event)
        except WebhookFailed as error:
            self.metrics.alert_deliveries.labels("failed").inc()
            wait_s = min(_FIRST_RETRY_S * 2 ** min(self._failures, 16), _LONGEST_RETRY_S)
            self._failures, self._next = self._failures + 1, self.clock() + wait_s
            _LOG.warning("an alert was not delivered, and is tried again in %.0f s: %s", wait_s, error)
            return False
        self.metrics.alert_deliveries.labels("delivered").inc()
        self._failures, self._told = 0, event.id
        return True

    def _due(self) -> list[alerts.AlertEvent]:
        with self.database.reading() as records:
            return records.alerts.due(_MOST_EVENTS)

    def _delivered(self, event: alerts.AlertEvent) -> None:
        with self.database.writing() as records:
            records.alerts.delivered(event)


async def watch_forever(
    database: Database, settings: Settings, replica: str, webhook: Webhook | None, metrics: Metrics
) -> None:
    """Evaluate alerts and tell of them until this is cancelled. A failure is logged, and tried again at the next look.

    A thread in which it looks has ended once this has been cancelled.
    """
    watch = Watch(database, settings, replica, tells=webhook is not None)
    courier = None if webhook is None else AlertSender(database, webhook, metrics)
    while True:
        try:
            if await _in_thread(watch.look) and courier is not None:
                await courier.deliver()
        except Exception as error:
            _LOG.error("alerts could not be evaluated, or noted as delivered: %s", error)
        await asyncio.sleep(_EVERY_S)


def findings_of_tasks(records: Records) -> list[alerts.Finding]:
    """What needs somebody among the tasks that are not over, and their releases."""
    tasks = records.tasks(TaskState.ACTIVE, TaskState.PAUSED)
    found = alerts.of_tasks(zip(tasks, records.progress(tasks), strict=True))
    for task in tasks:
        if task.release is not None:
            expires_at = decode_release(task.release.text).expires_at
            found += alerts.of_expiry("the release", expires_at, _at_utc(expires_at), records.at, task)
    return found


def findings_here(settings: Settings, now: float) -> list[alerts.Finding]:
    """What needs somebody at this process: its certificate as the file is now, and disks of its folders.

    Object stores and database servers have their own monitoring.
    """
    found = [] if settings.tls_cert is None else _certificate(settings.tls_cert, now)
    blobs = None if "://" in settings.blobs else Path(settings.blobs)
    for name, place in {"the blobs": blobs, "the database": sqlite_path(settings.database)}.items():
        if place is not None:
            found += _disk(name, place)
    return found


def _disk(name: str, place: Path) -> list[alerts.Finding]:
    try:
        usage = shutil.disk_usage(place)
    except FileNotFoundError:  # not made yet
        return []
    except OSError as error:  # such as a network's file system that is away
        return [alerts.of_unreadable(name, place, error, "mount it again, or let the coordinator's user read it")]
    return alerts.of_disk(name, usage.free, usage.total)


def _certificate(path: Path, now: float) -> list[alerts.Finding]:
    what = "the TLS certificate"
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        return [alerts.of_unreadable(what, path, error, "put a good one there")]
    expires_at = certificate.not_valid_after_utc.timestamp()
    return alerts.of_expiry(what, expires_at, _at_utc(expires_at), now)


def _at_utc(at: float) -> str:
    return f"{datetime.fromtimestamp(min(at, _LAST), UTC):%Y-%m-%d %H:%M} UTC"


async def _in_thread(act: Callable[[], T]) -> T:
    running = asyncio.create_task(asyncio.to_thread(act))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([running])
