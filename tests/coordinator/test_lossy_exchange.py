"""Masked reports at replicas whose messages to the driver are lost, come twice or late, and that die, by a seed."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from coordinator.api import masked_exchange
from coordinator.api.masked_exchange import MaskedExchange
from coordinator.commands import ExchangeMasked
from coordinator.errors import NoLongerNeeded, Refusal, Unavailable
from coordinator.rules.replicas import Grant, decode_news
from coordinator.rules.states import AssignmentState
from tests.coordinator.conftest import Desk
from tests.coordinator.test_masked_claims import STEP, TEN, Elsewhere, expect_sum_of, upload_of
from tests.coordinator.test_secure import LENIENT, PHASES, run, seat, states
from tests.coordinator.test_secure_groups import DIVIDED, mean_of, seat_all

ARRIVES, IS_ANSWERED, COMES_AGAIN, HANGS_UP, IS_REPEATED, DIES = 0.8, 0.8, 0.1, 0.2, 0.4, 0.01


class Sea:
    """The channel between replicas, to a driver on a clock of its own."""

    def __init__(self, desk, luck):
        self.desk, self.luck, self.late = desk, luck, []

    async def post(self, replica, path, body):
        await asyncio.sleep(0.002 * self.luck.random())
        if self.luck.random() < COMES_AGAIN:
            self.late.append(body)
        answer = self.arrive(body) if self.luck.random() < ARRIVES else None
        await asyncio.sleep(0.002 * self.luck.random())
        return answer if self.luck.random() < IS_ANSWERED else None

    def arrive(self, body):
        news, sums = decode_news(memoryview(body))
        with suppress(Refusal):
            return msgspec.json.encode(self.desk.ask(ExchangeMasked(news, sums)))
        return None

    async def pass_time(self, devices):
        """The driver's clock goes on until it announces whose reports are in the sum, and late messages come."""
        while True:
            await asyncio.sleep(0.004)
            if not heard(devices):
                self.desk.pass_time(0.05)
            if self.late and self.luck.random() < 0.1:
                self.arrive(self.late.pop(self.luck.randrange(len(self.late))))


class Replicas:
    """Three that do not drive. One that dies is followed by another, which knows nothing."""

    def __init__(self, sea):
        self.sea, self.born, self.exchanges = sea, 0, []
        for _ in range(3):
            self.exchanges.append(self.new())

    def new(self):
        self.born += 1
        return exchange_over(self.sea, f"replica{self.born}")

    def kill(self, number):
        for _, task in self.exchanges[number]._talks.values():
            task.cancel()
        self.exchanges[number] = self.new()


def exchange_over(channel, name):
    """The exchange of a replica of this name that reaches the driver at a desk over such a channel."""
    directory = SimpleNamespace(urls={channel.desk.membership.id: "http://driver"})
    membership = SimpleNamespace(id=name, directory=directory)
    driver = SimpleNamespace(shared=SimpleNamespace(leaving=False))
    return MaskedExchange(SimpleNamespace(membership=membership, driver=driver), channel)


async def upload(device, replicas, luck):
    """Send the masked report of a device here and there, until it is taken or too late."""
    message = upload_of(device)
    sha256, taken = hashlib.sha256(message).hexdigest(), False
    while not taken or luck.random() < IS_REPEATED:
        await asyncio.sleep(0.004 * luck.random())
        if luck.random() < DIES:
            replicas.kill(luck.randrange(3))
        try:
            if (place := luck.randrange(4)) == 3:
                device.say(7, message)
            else:
                sending = replicas.exchanges[place].take(device.given.assignment, message, sha256)
                await asyncio.wait_for(sending, 0.005 if luck.random() < HANGS_UP else 0.5)
            taken = True
        except (Unavailable, TimeoutError):
            continue
        except NoLongerNeeded:
            return


async def uploads(devices, replicas, luck):
    ticking = asyncio.create_task(replicas.sea.pass_time(devices))
    await asyncio.gather(*(upload(device, replicas, luck) for device in devices))
    while states(replicas.sea.desk.store, devices[0].given.task) == ["reporting"] and not heard(devices):
        await asyncio.sleep(0.01)
    ticking.cancel()


class Line:
    """A channel that carries every message, but for the first ones: these are lost, or their answers."""

    def __init__(self, desk, *fates):
        self.desk, self.fates, self.sums = desk, list(fates), []

    async def post(self, replica, path, body):
        fate = self.fates.pop(0) if self.fates else "answered"
        if fate == "lost":
            return None
        news, sums = decode_news(memoryview(body))
        self.sums.append([one.session for one in news.shares if one.size])
        answer = msgspec.json.encode(self.desk.ask(ExchangeMasked(news, sums)))
        return answer if fate == "answered" else None


async def take(exchange, *devices):
    """Send masked reports to a replica, at once."""
    messages = {device.given.assignment: upload_of(device) for device in devices}
    await asyncio.gather(*(exchange.take(name, one, hashlib.sha256(one).hexdigest()) for name, one in messages.items()))


async def nothing_to_tell(exchange):
    """Return once a replica has told all."""
    await asyncio.gather(*(task for _, task in exchange._talks.values()))


def heard(devices):
    """The devices that are told whose reports are in the sum."""
    found = []
    for device in devices:
        with suppress(NoLongerNeeded):
            if device.hear(8) is not None:
                found.append(device)
    return found


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 60))])
def test_sum_has_exactly_the_reports_of_those_whom_m8_names(store, register, monkeypatch, seed):
    monkeypatch.setattr(masked_exchange, "_EVERY_S", 0.01)
    monkeypatch.setattr(masked_exchange, "_GATHER_S", 0.001)
    luck, task, desk = random.Random(seed), register(**LENIENT), Desk(store)
    devices = seat(desk, TEN, {name: [number / 16, -number / 32, 0, 1] for number, name in enumerate(TEN)})
    run(devices, PHASES[:3])
    for device in devices:
        desk.hold(device.given)
    sea = Sea(desk, luck)
    asyncio.run(uploads(devices, Replicas(sea), luck))
    named = heard(devices)
    if not named:
        assert store.rounds(task)[0].reason in ("replica-lost", "too-few-reports", "devices-lost")
        return
    run(named, PHASES[4:])
    assert states(store, task) == ["committed"], store.rounds(task)
    np.testing.assert_allclose(store.checkpoint(task, 1)["params"], mean_of(named), atol=STEP)
    counted = {one.id for one in store.cohort(task, 1) if one.state is AssignmentState.REPORTED}
    assert counted == {device.given.assignment for device in named}


def test_claim_whose_answer_was_lost_is_given_back_in_the_end(register, desk):
    register(**LENIENT)
    devices, line = seat(desk, TEN), Line(desk, "unanswered", "lost", "lost")
    run(devices, PHASES[:3])

    async def lose_a_grant():
        exchange = exchange_over(line, "replica1")
        with pytest.raises(Unavailable):
            await take(exchange, devices[0])
        await nothing_to_tell(exchange)

    asyncio.run(lose_a_grant())
    assert isinstance(Elsewhere(desk, "replica2").claim(devices[0]), Grant)


def test_report_that_was_added_under_a_void_claim_may_be_added_elsewhere(register, desk, monkeypatch):
    monkeypatch.setattr(masked_exchange, "_EVERY_S", 0.01)
    register(**LENIENT)
    devices, line = seat(desk, TEN), Line(desk, "answered", *["lost"] * 100_000)
    run(devices, PHASES[:3])

    async def come_again():
        exchange = exchange_over(line, "replica1")
        await take(exchange, devices[0])
        Elsewhere(desk, "replica1").tell()  # an old message comes late, in which the report is not being checked
        line.fates.clear()
        with pytest.raises(Unavailable):
            await take(exchange, devices[0])
        async with asyncio.timeout(20):
            while not isinstance(Elsewhere(desk, "replica2").claim(devices[0]), Grant):
                await asyncio.sleep(0.01)

    asyncio.run(come_again())


def test_sums_of_many_groups_go_to_the_driver_in_several_messages(store, register, desk, monkeypatch):
    monkeypatch.setattr(masked_exchange, "_TOGETHER_BYTES", 1)
    task, line = register(**DIVIDED), Line(desk)
    devices, groups = seat_all(desk)
    run(devices, PHASES[1:3])

    async def hand_over():
        exchange = exchange_over(line, "replica1")
        await take(exchange, *devices)
        await nothing_to_tell(exchange)

    asyncio.run(hand_over())
    assert sorted(map(len, line.sums))[-len(groups) :] == [1] * len(groups)
    run(devices, PHASES[4:])
    expect_sum_of(store, task, devices)
