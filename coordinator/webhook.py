"""The webhook of alerts: signed JSON to an address of the operators' choice.

The header `Muster-Signature: t=SECONDS,v1=HEX` has the time of the try and the HMAC-SHA256 of `SECONDS.BODY` under the
secret. A try has a time limit in all; redirects are not followed, the answer's body is not read, and no proxy of the
environment is used. An address may hold secrets, so messages name scheme, host and port only.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec

from coordinator.errors import WebhookFailed
from coordinator.rules.alerts import Alert, AlertEvent, AlertKind
from coordinator.settings import place_of, read_secret

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

    async def send(self, event: AlertEvent) -> None:
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
    alert = Alert(id=secrets.token_hex(8), kind=AlertKind.TEST, text=text, raised_at=time.time())
    asyncio.run(webhook.send(AlertEvent(alert, cleared=False)))
