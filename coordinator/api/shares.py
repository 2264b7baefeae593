"""Shares: reports of which replicas tell drivers, and the sums of these. Spec: docs/spec/rounds.md §5."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from starlette.responses import Response

from coordinator.api.http import aside
from coordinator.api.replica_channel import ReplicaChannel
from coordinator.api.service import Service
from coordinator.commands import TakeShare
from coordinator.failpoints import reach
from coordinator.rules.shared_sums import decode_shares, encode_shares

_LOG = logging.getLogger(__name__)
SHARES = "/replicas/shares"
_EVERY_S, _LOOK_S = 0.4, 0.05
_BEAT_S = 1.0
"""How often a driver hears, at least, of a replica that sums reports for it."""
_LAST_S = 2.0
"""How long a process that stops waits until drivers have its sums."""


class ShareSender:
    """Tells the drivers of rounds which reports came here, and hands over the sums."""

    def __init__(self, service: Service, channel: ReplicaChannel) -> None:
        self._membership = service.membership
        self._channel = channel
        self._sums = service.driver.shared
        self._sent: dict[str, float] = {}
        self._busy: set[str] = set()

    async def send_forever(self) -> None:
        """Send what is new, a few times a second, and sums at once. What did not arrive is sent again.

        A driver that does not answer holds up no other.
        """
        async with asyncio.TaskGroup() as sending:
            while True:
                until = time.monotonic() + _EVERY_S
                while time.monotonic() < until and not self._sums.closing - self._busy:
                    await asyncio.sleep(_LOOK_S)
                for driver in self._sums.drivers - self._busy:
                    self._busy.add(driver)
                    sending.create_task(self._send(driver))
                await asyncio.sleep(_LOOK_S)

    async def send_last(self) -> None:
        """Return once drivers have all that `send_forever` sends, as this process ends; but soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                while self._sums.wait:
                    await asyncio.sleep(_LOOK_S)

    async def _send(self, driver: str) -> None:
        now = time.monotonic()
        try:
            if driver not in self._membership.directory.urls:  # who takes its populations abandons the rounds
                return
            message, sums = self._sums.news(self._membership.id, driver)
            if not message.shares and now < self._sent.get(driver, 0.0) + _BEAT_S:
                return
            if sums:
                reach("sum.before-hand-over")
            body = await aside(sum(one.nbytes for one in sums), encode_shares, message, sums)
            if await self._channel.post(driver, SHARES, body) is not None:
                self._sums.heard(message)
                self._sent = {one: at for one, at in self._sent.items() if now < at + _BEAT_S} | {driver: now}
        except Exception as error:
            _LOG.error("sums could not be handed over: %s", error)
        finally:
            self._busy.discard(driver)


async def take_shares(service: Service, data: memoryview) -> Response:
    """Answer a replica that has told of reports, or hands sums over, once that is committed."""
    shares, sums = await aside(len(data), decode_shares, data)
    service.driver.heard_of(shares.replica)
    for assignment in shares.present:
        service.driver.presence.heard(assignment)
    taken = [
        service.driver.submit(TakeShare(shares.replica, share, total))
        for share, total in zip(shares.shares, sums, strict=True)
    ]
    await asyncio.gather(*(asyncio.wrap_future(one) for one in taken))
    return Response(status_code=204)
