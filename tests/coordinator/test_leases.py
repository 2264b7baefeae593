"""Who drives which population: the decisions, and drivers that share a store on a clock that only the test moves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest

from coordinator.commands import AwaitAssignment
from coordinator.driver.replica_membership import Membership, ReplicaConfig
from coordinator.errors import DatabaseLocked, LeaseLost, NoLongerNeeded, Unavailable, UnknownSession
from coordinator.keys import Keys, rotate
from coordinator.rules import replicas as replica_rules
from coordinator.rules.states import TaskState
from tests.coordinator.conftest import Desk

LEASE_S = 10.0


def replica(id_, beat=0, draining=False):
    return replica_rules.Replica(id_, f"http://{id_}", beat, draining)


def settled(holders, ids):
    """The holders of populations once every replica has made its moves often enough, and how many moves that took."""
    made = 0
    for _ in range(len(holders) + 1):
        for me in ids:
            leases = [replica_rules.Lease(population, holder, 0) for population, holder in sorted(holders.items())]
            held = {lease.population for lease in leases if lease.holder == me}
            chosen = replica_rules.lease_changes(
                replica(me), [replica(one) for one in ids if one != me], leases, held, held
            )
            made += len(chosen.take) + len(chosen.give_back)
            holders = holders | {lease.population: me for lease in chosen.take} | dict.fromkeys(chosen.give_back)
    return holders, made


@pytest.mark.parametrize("populations", [0, 1, 2, 3, 7, 20])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_shares_differ_by_one_at_most_and_then_nothing_moves(populations, replicas):
    ids = [f"r{number}" for number in range(replicas)]
    for holder in (None, "r0", "gone"):
        holders, _ = settled({f"p{number:02}": holder for number in range(populations)}, ids)
        counts = sorted(list(holders.values()).count(id_) for id_ in ids)
        assert sum(counts) == populations
        assert counts[-1] - counts[0] <= 1
        assert settled(holders, ids) == (holders, 0)


def test_only_as_many_populations_move_to_a_new_replica_as_it_should_have():
    holders = {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}
    assert settled(holders, ["r0", "r1", "r2"])[1] == 2
    assert settled({"a": "r1"}, ["r0", "r1"]) == ({"a": "r1"}, 0)


def test_idle_populations_are_given_up_before_those_with_a_running_round():
    leases = [replica_rules.Lease(name, "me", 1) for name in ("a", "b", "c")]
    chosen = replica_rules.lease_changes(replica("me"), [replica("other")], leases, {"a", "b", "c"}, {"c"})
    assert chosen == replica_rules.LeaseChanges(give_back=frozenset("c"))


def test_draining_replica_gives_up_all_leases_and_is_not_counted():
    leases = [replica_rules.Lease("a", "me", 1), replica_rules.Lease("b", None, 1)]
    draining = replica("me", draining=True)
    assert replica_rules.lease_changes(draining, [], leases, {"a"}, set()) == replica_rules.LeaseChanges(
        give_back=frozenset("a")
    )
    assert replica_rules.lease_changes(replica("x"), [draining], leases, set(), set()) == replica_rules.LeaseChanges(
        take=(leases[1],)
    )


def test_lease_that_this_process_does_not_remember_is_taken_again():
    lease = replica_rules.Lease("a", "me", 3)
    assert replica_rules.lease_changes(replica("me"), [], [lease], set(), set()) == replica_rules.LeaseChanges(
        take=(lease,)
    )


def test_replica_without_a_beat_for_the_lease_time_is_gone():
    beats = replica_rules.observe_beats({}, [replica("x", 7), replica("y", 7)], 100.0)
    beats = replica_rules.observe_beats(beats, [replica("x", 7), replica("y", 8)], 109.0)
    assert replica_rules.gone(beats, 109.0, LEASE_S) == {}
    beats = replica_rules.observe_beats(beats, [replica("x", 7), replica("y", 8)], 110.0)
    assert replica_rules.gone(beats, 110.0, LEASE_S) == {"x": 7}
    assert replica_rules.observe_beats(beats, [replica("y", 9)], 111.0).keys() == {"y"}


def test_clock_of_a_replica_is_known_once_it_was_seen_to_beat():
    other = replica_rules.Replica("x", "http://x", 7, draining=False, steady=50.0)
    beats = replica_rules.observe_beats({}, [other], 100.0)
    assert beats["x"].ahead_s is None
    beats = replica_rules.observe_beats(beats, [replace(other, beat=8, steady=955.0)], 105.0)
    assert beats["x"].ahead_s == 850.0
    assert replica_rules.observe_beats(beats, [replace(other, beat=8, steady=955.0)], 106.0) == beats


def test_ids_say_who_made_them_and_fit_their_columns():
    maker = replica_rules.new_replica_id()
    assert len(replica_rules.new_id(maker)) <= 32
    assert replica_rules.maker_of(replica_rules.new_id(maker)) == maker
    assert replica_rules.maker_of("nobody") == replica_rules.maker_of("a.b") == replica_rules.maker_of("") == ""


# --- drivers that share a store

every_engine = pytest.mark.every_engine


@pytest.fixture
def desks(store):
    """Two replicas; the first one has the smaller id, by which it gets the odd population."""
    both = [Desk(store, None, url, LEASE_S) for url in ("http://one", "http://two")]
    return sorted(both, key=lambda desk: desk.membership.id)


def pass_time(desks, seconds):
    """Let time pass, in steps, at the desks given; others do not wake up."""
    for _ in range(round(seconds)):
        for desk in desks:
            desk.pass_time(1)


@every_engine
def test_driver_that_slept_past_its_lease_commits_nothing(store, register, desks):
    first, second = desks
    task = register(goal=2, rounds=1)
    one, two = first.assign("a", "b")
    receipt = first.report(one, [100, 0, 0, 0])
    pass_time(desks, 20)
    with pytest.raises(Unavailable):
        second.arrive("a")
    pass_time([second], LEASE_S + 1)
    again = second.assign("c", "d")  # one of a and b was silent, and others are waited for
    assert [(a.round, a.attempt) for a in again] == [(1, 2), (1, 2)]
    with pytest.raises(Unavailable):
        first.report(two, [100, 0, 0, 0])
    with pytest.raises(NoLongerNeeded):
        first.report(two, [100, 0, 0, 0])
    assert first.report(one, [100, 0, 0, 0]) == receipt
    for assignment in again:
        second.report(assignment, [0, 1, 0, 0])
    assert store.checkpoint(task)["params"].tolist() == [1, 3, 3, 4]


def test_replica_says_when_it_takes_another_ones_population(register, desks):
    first, second = desks
    told = []
    for desk in desks:
        desk.membership.took_over = lambda desk=desk: told.append(desk)
    register()
    first.arrive("a")
    assert told == []
    pass_time([second], LEASE_S + 1)
    assert told == [second]


@every_engine
def test_round_of_a_lost_population_is_not_closed(store, register, desks, monkeypatch):
    first, second = desks
    task = register(goal=1, rounds=1)
    (one,) = first.assign("a")
    with monkeypatch.context() as patch:
        patch.setattr(store.blobs, "put", Mock(side_effect=OSError("the disk is full")))
        first.report(one, [100, 0, 0, 0])
    pass_time([second], LEASE_S + 1)
    first.pass_time(5)
    assert [(r.state.value, r.reason) for r in store.rounds(task)] == [("abandoned", "driver-lost")]
    assert store.checkpoint(task)["params"].tolist() == [1, 2, 3, 4]


def test_devices_of_a_lost_population_are_sent_away_to_come_back(register, desks):
    first, second = desks
    register(goal=2)
    waiting, idle = first.wait("a", 1000), first.arrive("b").session
    pass_time([second], LEASE_S + 1)
    first.pass_time(1)
    assert waiting.result(timeout=0).reason == "shutting-down"
    with pytest.raises(UnknownSession):
        first.ask(AwaitAssignment(idle, "b", 1))
    with pytest.raises(Unavailable):
        first.arrive("a")


@every_engine
def test_taking_a_population_leaves_the_rounds_of_others_alone(store, register, desks):
    first, second = desks
    kept = register(goal=1, population="tablets")
    first.pass_time(1)
    lost = register(goal=1)
    second.pass_time(1)
    second.assign("a")
    first.hold(first.wait("b", population="tablets").result(timeout=0))
    pass_time([first], LEASE_S + 1)
    first.assign("a")
    assert [round_.reason for round_ in store.rounds(lost)] == ["driver-lost", ""]
    assert [round_.reason for round_ in store.rounds(kept)] == [""]


def test_replica_that_takes_back_at_once_knows_whom_another_one_drew(register, desks):
    first, second = desks
    register(goal=1, rounds=9, min_separation_rounds=3)
    first.report(*first.assign("a"))
    pass_time(desks, 20)
    pass_time([second], LEASE_S + 2)
    (drawn,) = second.assign("b")
    second.report(drawn)
    second.turn()
    assert drawn.round == 2
    second.membership.leave()
    first.pass_time(1)  # it wakes, and finds the population lost and free in one look
    assert first.membership.held == {"phones"}
    came = [first.arrive(name) for name in ("a", "b", "c")]
    assert [getattr(answer, "reason", "accepted") for answer in came] == ["resting", "resting", "accepted"]


def test_population_is_handed_to_a_new_replica_when_its_round_is_over(store, register):
    for population in ("phones", "tablets"):
        register(goal=1, population=population)
    first = Desk(store, None, "http://first", LEASE_S)
    (one,) = first.assign("a")
    two = first.wait("b", population="tablets").result(timeout=0)
    for given in (one, two):
        first.hold(given)
    second = Desk(store, None, "http://second", LEASE_S)
    pass_time([first, second], 5)
    assert first.membership.held == {"phones", "tablets"}
    assert first.arrive("c").reason == "no-task"
    first.report(one)
    pass_time([first, second], 2)
    assert (first.membership.held, second.membership.held) == ({"tablets"}, {"phones"})
    first.report(two)
    assert second.assign("a")[0].round == 2


@every_engine
def test_process_at_the_address_of_another_is_its_successor_at_once(store, register):
    register(goal=1)
    before = Desk(store, None, "http://here", LEASE_S)
    before.assign("a")
    after = Desk(store, None, "http://here", LEASE_S)
    assert after.assign("a")[0].attempt == 2
    before.pass_time(LEASE_S)
    after.pass_time(LEASE_S)
    assert (before.membership.held, after.membership.held) == (set(), {"phones"})


@every_engine
def test_draining_replica_gives_idle_populations_to_others_at_once(register, desks):
    first, second = desks
    register(goal=1)
    first.pass_time(1)
    first.driver.drain()
    pass_time(desks, 2)
    assert (first.membership.held, second.membership.held) == (set(), {"phones"})


@pytest.mark.promise("A process that slept past its lease commits nothing")
@every_engine
def test_transaction_of_an_earlier_holder_is_undone_as_a_whole(store, register, desks):
    first, second = desks
    task = register(goal=1)
    first.pass_time(1)
    pass_time([second], LEASE_S + 1)
    with pytest.raises(LeaseLost, match="phones"), first.membership.writing() as records:
        records.move_task(records.task(task), TaskState.CANCELLED, "test")
    assert store.task(task).state is TaskState.ACTIVE


@every_engine
def test_population_is_not_taken_during_a_transaction_of_its_holder(store, register, desks):
    first, second = desks
    task = register(goal=1)
    first.pass_time(1)
    pass_time([second], LEASE_S - 2)
    with first.membership.writing() as records:
        records.move_task(records.task(task), TaskState.PAUSED, "test")
        second.pass_time(3)
        assert second.membership.held == set()
    pass_time([second], LEASE_S + 1)
    assert (second.membership.held, store.task(task).state) == ({"phones"}, TaskState.PAUSED)


@every_engine
def test_holder_writes_nothing_while_and_after_its_population_is_taken(store, register, desks):
    first, second = desks
    register(goal=1)
    first.pass_time(1)
    with store.database.writing() as records:
        records.leases.forget(first.membership.id)
        assert records.leases.take(replica_rules.Lease("phones", first.membership.id, 1), second.membership.id)
        with pytest.raises(DatabaseLocked), first.membership.writing():
            pass
    with pytest.raises(LeaseLost), first.membership.writing():
        pass


@every_engine
def test_of_replicas_that_start_together_at_one_url_one_is_left(store, tmp_path):
    keys = Keys.open(tmp_path / "keys", store.database)

    def announce(_):
        membership = Membership(store, ReplicaConfig(lease_s=LEASE_S), keys)
        membership.listen_at("http://one")
        membership.announce(0.0)
        return membership.id

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(announce, range(8)))
    with store.database.reading() as records:
        (left,) = records.leases.replicas()
    assert left.id in ids


def test_a_replica_with_the_file_of_a_succeeded_key_drives_nothing(store, register, tmp_path):
    def replica_with(file):
        membership = Membership(store, ReplicaConfig(lease_s=LEASE_S), Keys.open(file, store.database))
        membership.listen_at(f"http://{file.name}")
        membership.announce(0.0)
        return membership

    register()
    first, second = tmp_path / "first", tmp_path / "second"
    behind = replica_with(first)
    second.write_bytes(first.read_bytes())
    behind.refresh(0.0, frozenset())
    assert behind.held == {"phones"}
    rotate(second, store.database)
    behind.refresh(1.0, behind.held)
    assert (behind.superseded, behind.held) == (True, frozenset())
    ahead = replica_with(second)
    ahead.refresh(1.0, frozenset())
    assert ahead.held == {"phones"}
    first.write_bytes(second.read_bytes())
    behind.refresh(2.0, frozenset())
    assert not behind.superseded
