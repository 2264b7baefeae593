"""The channel between replicas and the shares that go over it, sums of masked reports of others' rounds among them.

All of it is in memory, and used only by the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Set as AbstractSet
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx2
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.api.http import answer_error, in_thread_if_large, read_into
from coordinator.api.service import Service
from coordinator.commands import ExchangeMasked, TakeShare
from coordinator.driver.replica_membership import Membership
from coordinator.errors import (
    ConflictingReport,
    MalformedMessage,
    NoLongerNeeded,
    Refusal,
    Unavailable,
    UnusableMessage,
)
from coordinator.failpoints import reach
from coordinator.rules import replicas
from coordinator.rules.replicas import decode_shares, encode_shares
from ingress.connection import Body, memory_of
from secagg.errors import SecaggError
from secagg.session import ExpectedVector, MaskedSum, no_words

# The channel on which replicas tell drivers what they sum, and the shares that go over it.
#
# Spec: docs/spec/rounds.md §5. A request proves with a key that all replicas have that one of them sent it, and its
# target has the digest of its body.


_LOG = logging.getLogger(__name__)
FORWARDED = b"muster-forwarded"
_ROUTE = SimpleNamespace(path="shares of a replica")
_TIMES = httpx2.Timeout(30.0, connect=2.0, pool=2.0)
Take: TypeAlias = Callable[[Service, memoryview], Awaitable[Response]]
"""Takes the body of a request, and answers once what it says is done."""


def proof_of(key: bytes, method: str, target: bytes, replica: str) -> bytes:
    """The proof that a replica sent a request to `replica`."""
    return hmac.digest(key, b" ".join((method.encode(), target, replica.encode())), "sha256").hex().encode()


async def wait_while_there(replica: str, membership: Membership, promises: AbstractSet[asyncio.Future[Any]]) -> None:
    """Return when one of `promises` is kept. Raises httpx2.ReadTimeout when `replica` is taken for gone before."""
    # Rarer than the directory changes, and rare enough for ten thousand that wait.
    look_s = max(0.5, membership.lease_s / 3)
    while not (await asyncio.wait(promises, timeout=look_s, return_when=asyncio.FIRST_COMPLETED))[0]:
        if replica not in membership.directory.urls:
            raise httpx2.ReadTimeout("it is taken for gone")


class ReplicaChannel:
    """Requests of this replica to others."""

    def __init__(self, service: Service) -> None:
        self._membership = service.membership
        self._keys = service.keys
        self._client: httpx2.AsyncClient | None = None

    async def post(self, replica: str, path: str, body: bytes) -> bytes | None:
        """The answer of a replica; None, and a line in the log, if it is gone, cannot be reached or refuses."""
        url = self._membership.directory.urls.get(replica)
        if url is None:
            return None
        digest = await in_thread_if_large(len(body), hashlib.sha256, body)
        target = f"{path}?sha256={digest.hexdigest()}".encode()
        proof = proof_of(self._keys.between_replicas, "POST", target, replica)
        headers = [(b"content-type", b"application/octet-stream"), (FORWARDED, proof)]
        extensions = {"target": urlsplit(url).path.rstrip("/").encode() + target}
        sending = self._opened().post(url, content=body, headers=headers, extensions=extensions)
        answering = asyncio.ensure_future(sending)
        try:
            await wait_while_there(replica, self._membership, {answering})
            answered = answering.result()
        except httpx2.TransportError as error:
            _LOG.warning("replica %s cannot be told of reports: %s", replica, type(error).__name__)
            return None
        finally:
            answering.cancel()
        if not answered.is_success:
            _LOG.warning("replica %s took no shares: %s", replica, answered.text[:200])
            return None
        return answered.content

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _opened(self) -> httpx2.AsyncClient:
        if self._client is None:
            # As for what is forwarded: the system says which authorities are trusted, and no proxy is used.
            self._client = httpx2.AsyncClient(verify=ssl.create_default_context(), trust_env=False, timeout=_TIMES)
        return self._client


async def answer_replica(service: Service, take: Take, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer another replica's request, in memory that is reserved as for reports."""
    scope["route"] = _ROUTE
    request = Request(scope, receive, send)
    try:
        size = int(request.headers.get("content-length", "0"))
        with service.limits.reports.reserve(size):
            body = Body(memory_of(size))
            await read_into(body, request, size)
            if body.digest().hex() != request.query_params.get("sha256"):
                raise MalformedMessage("the body of these shares is another than was sent")
            answer = await take(service, body.data)
    except Exception as error:
        answer = answer_error(request, error, service.settings.soon)
    await answer(scope, receive, send)


SHARES = "/replicas/shares"
_AGAIN_S, _LOOK_S = 0.4, 0.05
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
                until = time.monotonic() + _AGAIN_S
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
            body = await in_thread_if_large(sum(one.nbytes for one in sums), encode_shares, message, sums)
            if await self._channel.post(driver, SHARES, body) is not None:
                self._sums.heard(message)
                self._sent = {one: at for one, at in self._sent.items() if now < at + _BEAT_S} | {driver: now}
        except Exception as error:
            _LOG.error("sums could not be handed over: %s", error)
        finally:
            self._busy.discard(driver)


async def take_shares(service: Service, data: memoryview) -> Response:
    """Answer a replica that has told of reports, or hands sums over, once that is committed."""
    shares, sums = await in_thread_if_large(len(data), decode_shares, data)
    service.driver.heard_of(shares.replica)
    for assignment in shares.present:
        service.driver.presence.heard(assignment)
    taken = [
        service.driver.submit(TakeShare(shares.replica, share, total))
        for share, total in zip(shares.shares, sums, strict=True)
    ]
    await asyncio.gather(*(asyncio.wrap_future(one) for one in taken))
    return Response(status_code=204)


# Sums of the masked reports that come here, of secure rounds that other replicas drive. Spec: docs/spec/rounds.md §5.


MASKED = "/replicas/masked"
_GATHER_S, _EVERY_S = 0.01, 0.2
"""How long claims wait for others, so that many share a request; and how often a driver is asked what it wants."""

"""How long a process that stops waits until drivers have its sums."""
_TOGETHER_BYTES = 1 << 26
"""Sums that go with one message: a driver must have room for it, and claims wait until it is answered."""
_DENIALS: dict[str, type[Refusal]] = {
    one.slug: one for one in (ConflictingReport, NoLongerNeeded, Unavailable, UnusableMessage)
}


_Asked: TypeAlias = tuple[replicas.Claim, asyncio.Future[replicas.Grant | None]]
"""A claim, and the future of its outcome."""


@dataclass(slots=True)
class _Sum:
    """The sum of a session. told: how many of the reports in it the driver has heard of. closed: no other is added."""

    round: int
    total: MaskedSum
    taken: list[replicas.Taken] = field(default_factory=list)
    told: int = 0
    closed: bool = False


@dataclass(slots=True)
class _ReplicaExchange:
    """What this replica and one driver have to tell each other.

    checking: reports that may be added, and are not yet. uncertain: the driver may have granted what was not heard.
    """

    driver: str
    asked: list[_Asked] = field(default_factory=list)
    checking: set[str] = field(default_factory=set)
    sums: dict[bytes, _Sum] = field(default_factory=dict)
    uncertain: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.asked or self.checking or self.sums or self.uncertain)

    def message(self, replica: str, claims: list[replicas.Claim]) -> replicas.MaskedNews:
        """What the driver has not heard yet. Sums go with some of the closed ones."""
        going = self._going()
        shares = [
            replicas.MaskedShare(
                round=one.round,
                session=session,
                taken=one.taken[one.told :],
                count=len(one.taken),
                size=one.total.words.size if session in going else 0,
            )
            for session, one in self.sums.items()
        ]
        return replicas.MaskedNews(replica=replica, claims=claims, checking=sorted(self.checking), shares=shares)

    def _going(self) -> set[bytes]:
        """The sessions whose sums go with the next message: one that is closed, and others while there is room."""
        going, room = set[bytes](), _TOGETHER_BYTES
        for session, one in self.sums.items():
            size = one.total.words.nbytes
            if one.closed and (not going or size <= room):
                going.add(session)
                room -= size
        return going

    def heard(self, message: replicas.MaskedNews, answer: replicas.MaskedAnswer) -> None:
        """Take note of the driver's answer to a message."""
        self.uncertain = False
        for share in message.shares:
            self.sums[share.session].told = share.count
        for session in answer.over:
            self.sums.pop(session, None)
        for session in answer.wanted:
            if (found := self.sums.get(session)) is not None:
                found.closed = True
        if any(one.closed for one in self.sums.values()):
            self.news.set()

    def settle(self, asked: list[_Asked], answer: replicas.MaskedAnswer) -> None:
        """Pass the outcomes of claims on to those who wait for them."""
        for (claim, future), outcome in zip(asked, answer.outcomes, strict=True):
            if isinstance(
                outcome, replicas.Grant
            ):  # also of a device that hung up: then the next message gives it back
                self.sums.setdefault(outcome.session, _Sum(outcome.round, MaskedSum(no_words(outcome.words))))
            if future.done():
                continue
            if isinstance(outcome, replicas.Denial):
                future.set_exception(_DENIALS[outcome.slug](outcome.detail))
                continue
            if outcome is not None:
                self.checking.add(claim.assignment)
            future.set_result(outcome)


class MaskedExchange:
    """Adds masked reports that the drivers of their rounds let it add, and hands the sums over."""

    def __init__(self, service: Service, channel: ReplicaChannel) -> None:
        self._membership = service.membership
        self._shared = service.driver.shared
        self._channel = channel
        self._talks: dict[str, tuple[_ReplicaExchange, asyncio.Task[None]]] = {}

    async def take(self, assignment: str, message: bytes, sha256: str) -> None:
        """Add a device's masked report (M7) to its session's sum, once. sha256: of the message, hexadecimal.

        Raises ConflictingReport, NoLongerNeeded, UnusableMessage or Unavailable.
        """
        talk = self._talk_to(replicas.maker_of(assignment))
        answer: asyncio.Future[replicas.Grant | None] = asyncio.get_running_loop().create_future()
        talk.asked.append((replicas.Claim(assignment=assignment, sha256=sha256), answer))
        talk.news.set()
        try:
            grant = await answer
            if grant is not None:
                await self._add(talk, grant, assignment, message)
        except SecaggError as error:
            raise UnusableMessage(f"{type(error).__name__}: {error}") from error
        finally:
            talk.checking.discard(assignment)

    async def send_last(self) -> None:
        """Return once drivers have all sums, as this process ends and adds no more; but soon."""
        for talk, _ in self._talks.values():
            talk.news.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await asyncio.gather(*(task for _, task in self._talks.values()))

    async def close(self) -> None:
        """Tell nobody anything more."""
        tasks = [task for _, task in self._talks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _add(self, talk: _ReplicaExchange, grant: replicas.Grant, assignment: str, message: bytes) -> None:
        expected = ExpectedVector(grant.session, grant.position, grant.signer, grant.words)
        masked = await in_thread_if_large(len(message), expected.open, message)
        mine = talk.sums.get(grant.session)
        if mine is None or mine.closed or self._shared.leaving:
            raise Unavailable("this replica hands its sum of the session over; send the message again")
        if grant.position in mine.total.signatures:  # it was added under a claim that the driver took for void
            raise Unavailable("this replica has the message, and its driver did not hear of it; send it again")
        mine.total.add(grant.position, masked)
        mine.taken.append(replicas.Taken(assignment=assignment, signature=masked.signature))

    def _talk_to(self, driver: str) -> _ReplicaExchange:
        if driver not in self._talks:
            talk = _ReplicaExchange(driver)
            self._talks[driver] = talk, asyncio.create_task(self._talk(talk))
        return self._talks[driver][0]

    async def _talk(self, talk: _ReplicaExchange) -> None:
        """Tell a driver what is new: claims at once, all else a few times a second, until there is nothing to tell."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await talk.news.wait()
            talk.news.clear()
            await asyncio.sleep(_GATHER_S)
            try:
                await self._exchange(talk)
            except Exception as error:
                _LOG.error("masked reports could not be told of: %s", error)
            if talk.over:
                del self._talks[talk.driver]
                return

    async def _exchange(self, talk: _ReplicaExchange) -> None:
        asked, talk.asked = [one for one in talk.asked if not one[1].done()], []
        try:
            await self._tell(talk, asked)
        finally:
            for _, future in asked:
                if not future.done():
                    future.set_exception(Unavailable("the replica that drives this round cannot be reached; ask again"))

    async def _tell(self, talk: _ReplicaExchange, asked: list[_Asked]) -> None:
        if talk.driver not in self._membership.directory.urls:
            talk.sums.clear()  # whoever takes its populations abandons the rounds
            talk.uncertain = False
            return
        if self._shared.leaving:
            for mine in talk.sums.values():
                mine.closed = True
        message = talk.message(self._membership.id, [claim for claim, _ in asked])
        sums = [talk.sums[share.session].total.words for share in message.shares if share.size]
        if sums:
            reach("masked.before-hand-over")
        talk.uncertain |= bool(asked)
        body = await in_thread_if_large(sum(one.nbytes for one in sums), replicas.encode_news, message, sums)
        answered = await self._channel.post(talk.driver, MASKED, body)
        if answered is None:
            return
        answer = replicas.decode_answer(answered)
        talk.heard(message, answer)
        talk.settle(asked, answer)
        if sums:
            reach("masked.after-hand-over")


async def take_masked(service: Service, data: memoryview) -> Response:
    """Answer a replica that tells of masked reports, or hands sums over."""
    news, sums = replicas.decode_news(data)
    taken: Future[replicas.MaskedAnswer] = service.driver.submit(ExchangeMasked(news, sums))
    return Response(msgspec.json.encode(await asyncio.wrap_future(taken)), media_type="application/json")
