"""Sums of the masked reports that come here, of secure rounds that other replicas drive. Spec: docs/spec/rounds.md §5.

All of it is in memory, and used only by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from starlette.responses import Response

from coordinator.api.http import in_thread_if_large
from coordinator.api.replica_channel import ReplicaChannel
from coordinator.api.service import Service
from coordinator.commands import ExchangeMasked
from coordinator.errors import ConflictingReport, NoLongerNeeded, Refusal, Unavailable, UnusableMessage
from coordinator.failpoints import reach
from coordinator.rules import replicas
from secagg.errors import SecaggError
from secagg.session import ExpectedVector, MaskedSum, no_words

_LOG = logging.getLogger(__name__)
MASKED = "/replicas/masked"
_GATHER_S, _EVERY_S = 0.01, 0.2
"""How long claims wait for others, so that many share a request; and how often a driver is asked what it wants."""
_LAST_S = 2.0
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
