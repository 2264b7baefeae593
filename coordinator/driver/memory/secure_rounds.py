"""Secure rounds in progress, and those that ended a moment ago. Used only by the driver's thread."""

from __future__ import annotations

from collections.abc import Collection, Container
from contextlib import suppress

from coordinator.commands import ExchangeMasked
from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.errors import NoLongerNeeded, Refusal
from coordinator.rules.masked_shares import Claim, Denial, Grant, MaskedAnswer, MaskedShare
from coordinator.secure.round import SecureRound
from secagg.masking import Words

_LINGER_S = 60.0
"""How long the messages of a secure aggregation that is over can still be had."""


class SecureRounds:
    """Secure rounds by the row of their round."""

    def __init__(self) -> None:
        self._rounds: dict[int, SecureRound] = {}

    def of(self, assignment: str) -> SecureRound:
        """The secure round of an assignment. Raises NoLongerNeeded."""
        return self._find(assignment)[1]

    def exchange(self, command: ExchangeMasked, now: float) -> MaskedAnswer:
        """Hear of the masked reports that another replica added, and say which it may add."""
        news = command.news
        shares = zip(news.shares, command.sums, strict=True)
        over = [share.session for share, words in shares if not self._take_share(news.replica, share, words)]
        for secure in self._rounds.values():
            secure.release(news.replica, news.checking)
        outcomes = [self._grant(news.replica, claim) for claim in news.claims]
        wanted = [session for secure in self._rounds.values() for session in secure.wanted(news.replica, now)]
        return MaskedAnswer(outcomes=outcomes, wanted=wanted, over=over)

    def _take_share(self, replica: str, share: MaskedShare, words: Words | None) -> bool:
        secure = self._rounds.get(share.round)
        return secure is not None and secure.take_share(replica, share, words)

    def _grant(self, replica: str, claim: Claim) -> Grant | Denial | None:
        try:
            round_id, secure = self._find(claim.assignment)
            expected = secure.grant(claim.assignment, claim.sha256, replica)
        except Refusal as refused:
            return Denial(slug=refused.slug, detail=str(refused))
        if expected is None:
            return None
        return Grant(
            round=round_id,
            session=expected.sid,
            position=expected.position,
            signer=expected.signer,
            words=expected.words,
        )

    def _find(self, assignment: str) -> tuple[int, SecureRound]:
        for round_id, secure in self._rounds.items():
            if assignment in secure:
                return round_id, secure
        raise NoLongerNeeded("the assignment has no secure aggregation, or it is over")

    def leave(self, assignment: str) -> None:
        """Stop waiting for a device that gave up, if it is in any."""
        with suppress(NoLongerNeeded):
            self.of(assignment).leave(assignment)

    def lose(self, assignment: str, now: float) -> None:
        """Stop waiting for a device that was lost, if it is in any."""
        with suppress(NoLongerNeeded):
            self.of(assignment).lose(assignment, now)

    def advance(self, now: float) -> None:
        """End every phase that is due, and answer the devices that wait for it."""
        for secure in self._rounds.values():
            secure.advance(now)

    def dismiss(self, refusal: Refusal, row_ids: Container[int]) -> None:
        """Answer the devices that wait in one of these rounds with a refusal."""
        for round_id, secure in self._rounds.items():
            if round_id in row_ids:
                secure.dismiss(refusal)

    def adopt(self, rounds: Collection[OpenRound], now: float) -> None:
        """Add those of new rounds, and end those of rounds that take no more reports."""
        open_ = {round_.id for round_ in rounds if round_.reporting}
        self._rounds |= {round_.id: round_.secure for round_ in rounds if round_.secure}
        for round_id, secure in self._rounds.items():
            if round_id not in open_:
                secure.finish(now)

    def forget(self, now: float) -> None:
        """Drop those that ended long enough ago."""
        self._rounds = {
            round_id: secure
            for round_id, secure in self._rounds.items()
            if secure.ended_at is None or now < secure.ended_at + _LINGER_S
        }
