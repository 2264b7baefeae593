"""Sums of rounds in memory: noise of private ones, secure ones in progress, and those that replicas share."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from coordinator.commands import ExchangeMasked
from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.errors import NoLongerNeeded, Refusal
from coordinator.rules import replicas
from coordinator.rules.aggregation import KeptReports, ReportSum
from coordinator.rules.entities import NoiseSource, Task
from coordinator.rules.private_sums import (
    KEY_BYTES,
    KeyedNormals,
    add_noise,
    counted,
    entry_of,
    entry_of_devices,
    may_go_on,
    noise_size,
)
from coordinator.rules.states import RoundState
from coordinator.secure.round import SecureRound
from coordinator.store.records.records import Records
from fedcore.privacy.accounting import inverse_row, spent
from fedcore.privacy.settings import LedgerEntry
from fedcore.signing import SigningKey
from secagg.masking import Words

_PURPOSE = b"muster: noise of private rounds"
BUDGET_SPENT = "privacy-budget-spent"
"""Why a task is completed before its last round."""


@dataclass(frozen=True, slots=True)
class PrivateSum:
    """The noisy sum of a round, float64 (L,), its row, and the source of its noise, where later rounds need it.

    secret: of the keys under which what is made of it is stored until the row is committed.
    """

    total: NDArray[np.float64]
    entry: LedgerEntry
    source: NoiseSource | None = None
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))


@dataclass(slots=True)
class RoundSum:
    """What was added up of a round. noisy: the same with noise, from the first try of its commit on.

    count: how many additions to it came here, or of how many reports other replicas' sums are. handed: the replicas
    whose sums are in it.
    """

    reports: ReportSum | KeptReports
    noisy: PrivateSum | None = None
    count: int = 0
    handed: set[str] = field(default_factory=set)


def make_private(
    running: OpenRound, lineage: SigningKey, earlier: Sequence[NoiseSource], clip: float, total_L: NDArray[np.float64]
) -> PrivateSum:
    """Add the noise of a round to its sum, unless its devices did.

    earlier: the sources of the noise of the rounds before it. clip: the bound on the l2 norm of a report that its
    devices were sent.

    Noise that later rounds take back is made of a nonce, which is in the database, and the lineage key, which is not:
    a copy of the database is not enough to take noise off a model. The key of other noise is not kept.
    """
    settings, layout, devices = running.task.settings, running.plan.report.decoded, running.value.reported
    # An answer is the sum, which a mean over the goal is not where fewer reported.
    asks = running.plan.question is not UNSET
    total_L = counted(layout, total_L, devices if asks else max(devices, settings.in_round(running.number).goal))
    privacy, size = settings.promise, noise_size(layout)
    if privacy.noise_of_devices:
        return PrivateSum(total_L, entry_of_devices(settings, running.plan.report, running.number, devices))
    deviation = privacy.noise_multiplier * clip
    if privacy.mechanism == "gaussian":
        source, noise_M = None, KeyedNormals.fresh().standard_normal(size)
    else:
        source, noise_M = NoiseSource(secrets.token_bytes(KEY_BYTES), lineage.signer), np.zeros(size)
        sources, key = (*earlier, source), lineage.secret(_PURPOSE)
        for step, weight in inverse_row(privacy.mechanism, privacy.bands, len(sources)).items():
            derived = HKDF(SHA256(), KEY_BYTES, salt=sources[step - 1].nonce, info=_PURPOSE).derive(key)
            noise_M += weight * KeyedNormals(derived).standard_normal(size)  # of that round, the same ones again
    noise_M *= deviation
    entry = entry_of(privacy, running.number, clip, devices)
    return PrivateSum(add_noise(layout, total_L, noise_M, deviation), entry, source)


def write_row(records: Records, task: Task, private: PrivateSum) -> str | None:
    """Write the row of a round whose noisy sum this transaction releases.

    Answers why the task ends with it, in words, when its budget has no room for another round.
    """
    privacy, entry = task.settings.promise, replace(private.entry, target=task.settings.where or UNSET)
    entries = (*records.ledger.entries(task.id), entry)
    epsilon = spent(entries, privacy.delta)
    records.ledger.append(task.id, entry, epsilon, private.source)
    if may_go_on(privacy, entries):
        return None
    return (
        f"another round would exceed the privacy budget: ε {epsilon:.3g} of {privacy.epsilon:g} is spent, at δ "
        f"{privacy.delta:g}"
    )


_LINGER_S = 60.0
"""How long the messages of a secure aggregation that is over can still be had."""


class SecureRounds:
    """Secure rounds by the row of their round."""

    def __init__(self) -> None:
        self._rounds: dict[int, SecureRound] = {}

    def of(self, assignment: str) -> SecureRound:
        """The secure round of an assignment. Raises NoLongerNeeded."""
        return self._find(assignment)[1]

    def exchange(self, command: ExchangeMasked, now: float) -> replicas.MaskedAnswer:
        """Hear of the masked reports that another replica added, and say which it may add."""
        news = command.news
        shares = zip(news.shares, command.sums, strict=True)
        over = [share.session for share, words in shares if not self._take_share(news.replica, share, words)]
        for secure in self._rounds.values():
            secure.release(news.replica, news.checking)
        outcomes = [self._grant(news.replica, claim) for claim in news.claims]
        wanted = [session for secure in self._rounds.values() for session in secure.wanted(news.replica, now)]
        return replicas.MaskedAnswer(outcomes=outcomes, wanted=wanted, over=over)

    def _take_share(self, replica: str, share: replicas.MaskedShare, words: Words | None) -> bool:
        secure = self._rounds.get(share.round)
        return secure is not None and secure.take_share(replica, share, words)

    def _grant(self, replica: str, claim: replicas.Claim) -> replicas.Grant | replicas.Denial | None:
        try:
            round_id, secure = self._find(claim.assignment)
            expected = secure.grant(claim.assignment, claim.sha256, replica)
        except Refusal as refused:
            return replicas.Denial(slug=refused.slug, detail=str(refused))
        if expected is None:
            return None
        return replicas.Grant(
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


# Sums of the reports that came here, of rounds that other replicas drive. Spec: docs/spec/rounds.md §5.
#
# Only in memory: they go to the driver of their round over the replicas' channel, and never into the database. The
# driver's thread adds to them; any thread may read.


@dataclass(slots=True)
class SharedSum:
    """The sum of the reports of a round that came here, and which they are.

    closed: nothing is added any more. told: how many the driver has heard of; handed: whether it has the sum.
    """

    driver: str
    reports: ReportSum
    counted: list[replicas.Counted] = field(default_factory=list)
    closed: bool = False
    told: int = 0
    handed: bool = False


class SharedSums:
    """The sums of this replica, by the row id of their round, and the uploads that are on their way."""

    def __init__(self) -> None:
        self._sums: dict[int, SharedSum] = {}
        self._present: Counter[tuple[str, int]] = Counter()
        self.leaving = False
        """Set when the process is about to stop: it hands over what it has, and takes no more."""

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._sums))

    def takes(self, round_id: int) -> bool:
        """Whether reports of a round came here, and more may."""
        found = self._sums.get(round_id)
        return found is not None and not found.closed

    def closed(self, round_id: int) -> bool:
        """Whether the sum of a round is being handed over, so that no other report may be taken."""
        return self.leaving or (round_id in self._sums and not self.takes(round_id))

    @property
    def wait(self) -> bool:
        """Whether there are sums that drivers do not have."""
        return bool(self._unhanded())

    @property
    def closing(self) -> set[str]:
        """The drivers that can have sums now, and do not have them."""
        return {one.driver for one in self._unhanded().values() if one.closed}

    def add(
        self, round_: replicas.SharedRound, counted: list[replicas.Counted], vectors: list[NDArray[np.floating[Any]]]
    ) -> None:
        """Add reports (L,) whose receipts are committed, and which they are."""
        mine = self._sums.get(round_.id)
        if mine is None:
            mine = self._sums[round_.id] = SharedSum(
                replicas.maker_of(counted[0].assignment), ReportSum(round_.layout.size)
            )
        mine.reports.add(*vectors)
        mine.counted += counted

    def follow(self, states: Mapping[int, RoundState]) -> None:
        """Take note of how far the rounds are, by the store: one that takes no more reports, or has ended."""
        for round_id in self:
            state = states.get(round_id)
            if state is None or state.ended:
                del self._sums[round_id]
            elif state is not RoundState.REPORTING or self.leaving:
                self._sums[round_id].closed = True

    @contextmanager
    def expecting(self, assignment: str, round_id: int) -> Iterator[None]:
        """While a report of a round is on its way here, its driver is told that the device is there."""
        one = assignment, round_id
        self._present[one] += 1
        try:
            yield
        finally:
            self._present[one] -= 1
            if not self._present[one]:
                del self._present[one]

    def awaits(self) -> frozenset[str]:
        """The assignments whose reports are on their way here, of rounds that take them."""
        return frozenset(assignment for assignment, round_id in self._present if self.takes(round_id))

    @property
    def drivers(self) -> set[str]:
        """The drivers that are told of reports: those of uploads that are on their way, or of sums they do not have."""
        return {replicas.maker_of(one) for one, _ in self._present} | {one.driver for one in self._unhanded().values()}

    def news(self, replica: str, driver: str) -> tuple[replicas.Shares, list[NDArray[np.float64]]]:
        """What a driver has not been told yet: a message of this `replica`, and the sums (L,) that go with it."""
        mine = [(one, _share(id_, one)) for id_, one in self._unhanded().items() if one.driver == driver]
        due = [(one, share) for one, share in mine if share.counted or share.size]
        here = [assignment for assignment, _ in self._present if replicas.maker_of(assignment) == driver]
        message = replicas.Shares(replica=replica, present=here, shares=[share for _, share in due])
        return message, [one.reports.total() for one, share in due if share.size]

    def heard(self, message: replicas.Shares) -> None:
        """The driver has a message of `news`."""
        for share in message.shares:
            mine = self._sums.get(share.round)
            if mine is not None:
                mine.told = share.before + len(share.counted)
                mine.handed |= share.size > 0

    def _unhanded(self) -> dict[int, SharedSum]:
        return {id_: one for id_, one in tuple(self._sums.items()) if not one.handed}


def _share(round_id: int, mine: SharedSum) -> replicas.Share:
    size = mine.reports.total_L.size if mine.closed else 0  # read first: what is closed does not grow
    return replicas.Share(round=round_id, before=mine.told, counted=mine.counted[mine.told :], size=size)
