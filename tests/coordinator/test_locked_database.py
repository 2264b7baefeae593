"""A database that another transaction holds: devices are answered all the same, and every report counts once."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from coordinator.commands import AwaitAssignment, CheckInDevice, CountReport
from coordinator.driver.driver import Driver
from coordinator.driver.replica_membership import Membership, ReplicaConfig
from coordinator.driver.writing.write_transactions import RoundCloser
from coordinator.errors import Unavailable
from coordinator.rules.selection import Eligibility
from coordinator.secure.group import Executors
from coordinator.secure.round import SecureRoundFactory
from fedcore.wire.messages import Accepted, CheckIn
from tests.coordinator.bundles import report_vector
from tests.coordinator.conftest import AUTHORITY_KEY, KEYS, LINEAGE, RETRY, Desk, draw_at_once, states, unmask_at_once
from tests.coordinator.devices import CAPABILITIES
from tests.coordinator.test_leases import LEASE_S, pass_time

every_engine = pytest.mark.every_engine


@contextmanager
def locked(store):
    """Another process's transaction, which holds what a driver needs to write."""
    with store.database.writing() as records:
        if store.database.engine.dialect.name == "postgresql":  # SQLite's lock is of the whole file
            records._connection.exec_driver_sql("SELECT name FROM populations FOR UPDATE")
        yield


@pytest.fixture
def two(store):
    """Two replicas, of which the first takes the one population."""
    both = [Desk(store, None, url, LEASE_S) for url in ("http://one", "http://two")]
    return sorted(both, key=lambda desk: desk.membership.id)


@pytest.fixture
def driver(store):
    """A driver with its thread and its own clock."""
    membership = Membership(store, ReplicaConfig(lease_s=15.0), KEYS)
    membership.listen_at("http://driver")
    driver = Driver(
        membership, SecureRoundFactory(KEYS, AUTHORITY_KEY, Executors(unmask_at_once, draw_at_once), LINEAGE), RETRY, 64
    )
    driver.start()
    yield driver
    driver.stop()


@every_engine
def test_devices_check_in_while_another_transaction_holds_the_database(store, register, driver):
    register(goal=2)
    eligible = Eligibility.of("device", CheckIn(capabilities=CAPABILITIES, examples={"default": 10}))

    def arrive(device):
        # A stalled driver would take ten seconds for each transaction that it tries.
        return driver.submit(CheckInDevice("phones", device, eligible)).result(timeout=8)

    arrive("first")
    with locked(store):
        waiting = []
        for number in range(10):
            answer = arrive(str(number))
            assert isinstance(answer, Accepted)
            # Now a round should open, and a cohort be drawn.
            waiting.append(driver.submit(AwaitAssignment(answer.session, str(number), 60.0)))
        assert not any(one.done() for one in waiting)
    drawn, _ = wait(waiting, timeout=8, return_when=FIRST_COMPLETED)
    assert {one.result().round for one in drawn} == {1}


@every_engine
def test_report_waits_for_the_database_and_counts_once(store, register, desk):
    task = register(goal=2, rounds=1)
    first, second = desk.assign("a", "b")
    one, two = (CountReport(given.assignment, "digest", report_vector([4, 0, 0, 0], 1)) for given in (first, second))
    with locked(store):
        (receipt,) = desk.turn(one)
        desk.pass_time(1)
        (another,) = desk.turn(two)
        desk.pass_time(5)
        assert not receipt.done()
        assert not another.done()
    desk.pass_time(1)
    assert (receipt.result(timeout=0).round, another.result(timeout=0).round) == (1, 1)
    desk.pass_time(1)
    assert states(store, task) == [(1, 1, "committed", "")]
    assert store.checkpoint(task)["params"].tolist() == [5, 2, 3, 4]


@every_engine
def test_report_that_waited_too_long_for_the_database_may_be_sent_again(store, register, desk):
    register(goal=1)
    (given,) = desk.assign("a")
    desk.hold(given)
    with locked(store):
        (answer,) = desk.turn(CountReport(given.assignment, "digest", report_vector([0, 0, 0, 0], 1)))
        for _ in range(10):
            desk.pass_time(1)
        with pytest.raises(Unavailable, match="send it again"):
            answer.result(timeout=0)
    desk.pass_time(1)
    assert desk.report(given).round == 1


def test_round_is_committed_once_the_database_is_free(store, register, desk, monkeypatch):
    task = register(goal=1, rounds=1)
    (given,) = desk.assign("a")
    with monkeypatch.context() as patch:
        patch.setattr(RoundCloser, "close_rounds", lambda *_: False)
        desk.report(given)
    with locked(store):
        desk.pass_time(1)
        desk.pass_time(1)
        assert states(store, task) == [(1, 1, "aggregating", "")]
    desk.pass_time(1)
    assert states(store, task) == [(1, 1, "committed", "")]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_task_whose_row_was_locked_goes_on_once_that_is_over(store, register, desk):
    task = register(goal=1)
    with store.database.writing() as records:
        records.task(task)  # as for an operator's pause
        waiting = desk.wait("a", seconds=60)
        assert not waiting.done()
    desk.pass_time(1)
    assert waiting.result(timeout=0).task == task


@every_engine
def test_lock_that_stops_all_beats_costs_nobody_a_population(store, register, two):
    first, second = two
    task = register(goal=1, rounds=3)
    first.pass_time(1)
    (given,) = first.assign("a")
    first.hold(given)
    pass_time(two, 2)
    with store.database.writing() as records:
        if store.database.engine.dialect.name == "postgresql":
            records._connection.exec_driver_sql("SELECT id FROM replicas FOR UPDATE")
        pass_time(two, 2 * LEASE_S)
    # The one that is not late is first to look.
    pass_time([second, first], 2)
    assert first.membership.held == {"phones"}
    first.report(given)
    first.pass_time(1)
    assert store.rounds(task)[-1].state.value == "committed"


def test_replica_that_alone_cannot_write_loses_its_populations(store, register, two, monkeypatch):
    first, second = two
    register(goal=1)
    first.pass_time(1)

    @contextmanager
    def full():
        raise OSError("the disk is full")
        yield

    database = SimpleNamespace(reading=store.database.reading, writing_at_once=full)
    monkeypatch.setattr(first.membership, "_database", database)
    pass_time([first, second], LEASE_S + 2)
    assert (first.membership.held, second.membership.held) == (set(), {"phones"})
