"""The world of `tests.coordinator.one_hot` with three replicas: two that do not drive sum reports for the driver."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from typing import ClassVar

from coordinator.commands import CountReport, QueuedCommand, TakeShare
from coordinator.rules.replicas import SharedRound, decode_shares, encode_shares
from coordinator.store.tasks import open_coordinator_store
from fedcore.codecs import RoundKey
from fedcore.wire.messages import Receipt
from tests.coordinator.conftest import Desk
from tests.coordinator.disk import Disk
from tests.coordinator.one_hot_world import LEASE_S, BufferedWorld, Sent, World, outcome_of

ARRIVES, IS_ANSWERED = 0.7, 0.8
"""Of what replicas tell the driver, what arrives, and of that, where the answer does."""


class Helper:
    """A replica that drives nothing, as a process: what it remembers ends with it."""

    def __init__(self, world: World, source: random.Random) -> None:
        self.store = open_coordinator_store(world.url, world.folder / "blobs", clock=lambda: world.now)
        self.desk = Desk(self.store, source, url="", lease_s=LEASE_S, now=world.now, drives=False)
        self.disk = Disk(self.store.database, lambda: world.now)

    @property
    def shared(self):
        return self.desk.driver.shared


class SharedWorld(World):
    """Reports also go to the helpers, whose messages may be lost, come twice or late, and who may die."""

    operations: ClassVar = {
        "tell": 10,
        "kill_helper": 0.3,
        "stop_helper": 0.3,
        "fail_commit_elsewhere": 0.7,
        "lose_commit_elsewhere": 0.3,
    }

    def __init__(self, folder, database=""):
        self.luck, self.helpers, self.elsewhere = random.Random(1), [], Counter()
        super().__init__(folder, database)

    def boot(self):
        super().boot()
        while len(self.helpers) < 2:
            self.helpers.append(Helper(self, self.source))

    def close(self):
        super().close()
        for helper in self.helpers:
            helper.store.close()

    # --- operations

    def tell(self, pick):
        self.post(self.helpers[pick % 2])

    def kill_helper(self, pick):
        self.helpers.pop(pick % 2).store.close()
        self.helpers.append(Helper(self, self.source))
        self.seen["rounds that lost a sum"] += 1

    def stop_helper(self, pick):
        """It hands over what it has, and another one starts in its place."""
        stopping = self.helpers[pick % 2]
        stopping.shared.leaving = True
        for _ in range(5):
            self.turn()
            self.pass_time(0.5)
        self.kill_helper(pick)

    def fail_commit_elsewhere(self, pick):
        self.helpers[pick % 2].disk.faults = ["fails"]

    def lose_commit_elsewhere(self, pick):
        self.helpers[pick % 2].disk.faults = ["is lost"]

    # --- how it is done

    def turn(self, _=0):
        super().turn()
        self.turn_helpers()

    def turn_helpers(self):
        for helper in self.helpers:
            helper.desk.now = self.now
            helper.desk.driver.turn([])
            self.post(helper)

    def post(self, helper):
        """A replica's messages: each arrives at the driver that it is for, if that lives, or is lost."""
        for driver in helper.shared.drivers:
            message, sums = helper.shared.news(helper.desk.membership.id, driver)
            alive = [desk for desk in (self.desk, self.ghost) if desk and desk.membership.id == driver]
            if not alive or self.luck.random() > ARRIVES:
                continue
            shares, totals = decode_shares(memoryview(encode_shares(message, sums)))
            alive[0].now = self.now
            alive[0].driver.heard_of(shares.replica)
            pairs = zip(shares.shares, totals, strict=True)
            taken = [QueuedCommand(TakeShare(shares.replica, share, total), Future()) for share, total in pairs]
            alive[0].driver.turn(taken)
            if all(outcome_of(one.future) is None for one in taken) and self.luck.random() < IS_ANSWERED:
                helper.shared.heard(message)

    def report(self, phone, given, loss=0, heard=True):
        """Two in three reports come to a replica that does not drive their round."""
        super().report(phone, given, loss, heard)
        if number := self.luck.randrange(3):
            self.report_to(self.helpers[number - 1], phone, given, heard=heard)

    def report_to(self, helper, phone, given, *, heard):
        """The report that was sent last goes to a helper."""
        sent = self.inbox.pop()
        count = sent.queued.command
        with self.operator.database.reading() as records:
            round_id = records.assignment(given.assignment).round
        settings = self.operator.task(given.task).settings
        key, buffered = RoundKey(settings.seed, given.round), settings.buffered is not None
        shared = SharedRound(round_id, self.plan.report, settings.clear, key, buffered)
        command = CountReport(count.assignment, count.sha256, count.vector, shared)
        queued = QueuedCommand(command, sent.queued.future)
        helper.desk.now = self.now
        helper.desk.driver.turn([queued])
        if queued.future.done():  # else the database is held, and it waits
            self.elsewhere[round_id] += isinstance(outcome_of(queued.future), Receipt)
            self.hear([Sent(queued, phone, heard)])

    def check_round(self, row):
        super().check_round(row)
        self.seen["reports from other replicas in them"] += self.elsewhere.pop(row.id, 0)


class SharedBufferedWorld(SharedWorld, BufferedWorld):
    """The same in mode buffered. A version has all reports that came for it, also those beyond the goal."""

    asks_driver = False

    def go_on(self):
        super().go_on()
        self.turn_helpers()

    def goal_is_met(self, reported):
        return reported >= self.settings.goal

    def report_to(self, helper, phone, given, *, heard):
        if not self.asks_driver:
            super().report_to(helper, phone, given, heard=heard)

    def ask_for_receipts(self, known, in_sum):
        self.asks_driver = True
        super().ask_for_receipts(known, in_sum)
        self.asks_driver = False
