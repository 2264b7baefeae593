"""What devices that look for work are told: check-ins, sessions, waiting."""

from __future__ import annotations

import gc
import sys
from types import FunctionType, ModuleType

import msgspec
import pytest
import sqlalchemy

from coordinator.commands import AwaitAssignment, CancelWait, CheckInDevice
from coordinator.errors import UnknownPopulation, UnknownSession
from coordinator.rules.selection import Eligibility, Needs
from coordinator.rules.states import OnDevice, Requires
from fedcore.conditions import StatedConditions
from fedcore.errors import WireError
from fedcore.wire.messages import MOST_COLLECTIONS, MOST_NAMES, Accepted, CheckIn, Offer, Rejected, Willing, decode
from tests.coordinator.bundles import make_bundle, make_plan
from tests.coordinator.conftest import RETRY, bare
from tests.coordinator.devices import CAPABILITIES

every_engine = pytest.mark.every_engine
ABLE = msgspec.to_builtins(CAPABILITIES)


def writes(observer):
    """A number that grows with every transaction of another connection that writes."""
    sqlite = observer.dialect.name == "sqlite"
    query = "PRAGMA data_version" if sqlite else "SELECT pg_snapshot_xmax(pg_current_snapshot())"
    value = int(observer.exec_driver_sql(query).scalar())  # psycopg gives an xid8 as text
    observer.rollback()  # within one transaction an SQLite reader sees nothing of later ones
    return value


@pytest.mark.promise("A rejected check-in writes nothing")
@every_engine
def test_idle_task_and_rejected_check_ins_write_nothing(store, register, desk):
    task = register(min_examples=50)
    with store.database.engine.connect() as observer:
        desk.pass_time(1)
        before = writes(observer)
        assert bare(desk.arrive("a")) == Rejected("not-eligible", RETRY)
        assert bare(desk.arrive("a", formats=("other",))) == Rejected("not-eligible", RETRY)
        enough = {"default": 50}
        assert desk.arrive("a", formats=("other",), examples=enough).reason == "unsupported-format"
        desk.pass_time(50)
        assert writes(observer) == before
        assert desk.arrive("a", examples=enough).session
        desk.wait("b", examples=enough)
        assert writes(observer) > before
    assert store.rounds(task)[0].number == 1


def test_device_that_lacks_only_a_format_is_told_which_would_do(store, register, desk, tmp_path):
    register(make_bundle(tmp_path / "both", plan=make_plan(formats=("onnx", "executorch"))), formats=("executorch",))
    large = register(make_bundle(tmp_path / "other", plan=make_plan(formats=("coreml",))), formats=("coreml",))
    unsupported = Rejected("unsupported-format", RETRY, formats=("coreml", "executorch", "onnx"))
    assert bare(desk.arrive("a", formats=("tflite",))) == unsupported
    assert isinstance(desk.arrive("a", formats=("tflite", "executorch")), Accepted)
    store.pause(large)
    desk.pass_time(1)
    assert desk.arrive("a", formats=("tflite",)).formats == ("executorch", "onnx")
    assert bare(desk.arrive("a", formats=("tflite",), examples={"default": 0})) == Rejected("not-eligible", RETRY)


def test_device_is_offered_only_tasks_whose_rules_it_meets(register, desk):
    alone = OnDevice(charging=True, min_examples=3, max_example_age_s=60)
    asking = register(on_device=alone)
    register(requires=Requires(unmetered=True))
    (offer,) = desk.arrive("a").offers
    rules = {"min_examples": 1, "min_recent_examples": 3, "max_example_age_s": 60}
    wanted = Offer(task=asking, collection="default", charging=True, **rules)
    assert offer == wanted
    assert len(desk.arrive("a", conditions=StatedConditions(unmetered=True)).offers) == 2


def size_bytes(thing, seen):
    """The memory of an object and of all that it refers to, but for classes and functions."""
    if id(thing) in seen or isinstance(thing, type | FunctionType | ModuleType):
        return 0
    seen.add(id(thing))
    return sys.getsizeof(thing) + sum(size_bytes(one, seen) for one in gc.get_referents(thing))


def test_device_that_waits_costs_memory_only_for_what_tasks_ask(register, desk):
    task = register(goal=2)
    names = [f"{number:0200}" for number in range(MOST_COLLECTIONS - 1)]
    formats = ("onnx", *(f"{number:050}" for number in range(MOST_NAMES - 1)))
    waiting = desk.arrive("a", formats=formats, examples={"default": 8} | dict.fromkeys(names, 2**62))
    desk.turn(AwaitAssignment(waiting.session, "a", 10, frozenset([task, *names])))
    (session,) = desk.driver._memory.sessions.waiting()
    assert (session.eligibility.capabilities.examples, session.tasks) == ({"default": 8}, {task})
    kept = session.eligibility, session.tasks, session.population, session.id
    assert size_bytes(kept, set()) < 8192


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (CheckIn, {"capabilities": ABLE, "examples": {str(number): 1 for number in range(5000)}}),
        (CheckIn, {"capabilities": ABLE, "examples": {"x" * 201: 1}}),
        (CheckIn, {"capabilities": ABLE | {"formats": ["onnx"] * 17}, "examples": {}}),
        (CheckIn, {"capabilities": ABLE | {"formats": ["x" * 51]}, "examples": {}}),
        (CheckIn, {"capabilities": ABLE | {"secagg": ["SA1"] * 17}, "examples": {}}),
        (Willing, {"tasks": ["t"] * 257}),
        (Willing, {"tasks": ["t" * 201]}),
    ],
)
def test_message_that_names_more_than_a_device_can_is_malformed(kind, message):
    with pytest.raises(WireError, match="length"):
        decode(msgspec.json.encode(message), kind)


def test_device_that_does_not_say_what_a_rule_wants_is_not_eligible(register, desk):
    register(requires=Requires(charging=True))
    assert bare(desk.arrive("a")) == Rejected("not-eligible", RETRY)
    assert bare(desk.arrive("a", conditions=StatedConditions(charging=False))) == Rejected("not-eligible", RETRY)
    assert isinstance(desk.arrive("a", conditions=StatedConditions(charging=True)), Accepted)


def test_device_is_drawn_for_no_task_that_it_is_not_willing_for(store, register, desk):
    unwanted, wanted = register(goal=1), register(goal=1)
    (waiting,) = desk.turn(AwaitAssignment(desk.arrive("a").session, "a", 10, frozenset({wanted})))
    assert waiting.result(timeout=0).task == wanted
    (nowhere,) = desk.turn(AwaitAssignment(desk.arrive("b").session, "b", 10, frozenset({"another"})))
    assert not nowhere.done()
    assert store.rounds(unwanted) == []


@every_engine
def test_check_in_to_an_unknown_population_is_refused_until_it_exists(store, register, desk):
    with pytest.raises(UnknownPopulation, match="phones"):
        desk.arrive("a")
    task = register(goal=1)
    assert isinstance(desk.arrive("a"), Accepted)
    store.cancel(task)
    desk.pass_time(0.3)
    assert bare(desk.arrive("a")) == Rejected("no-task", RETRY)


@every_engine
def test_check_ins_to_unknown_populations_cost_one_look_up_a_turn(store, desk):
    statements = []
    for engine in (store.database.engine, store.database._engines.writer):
        sqlalchemy.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    message = CheckIn(capabilities=CAPABILITIES, examples={})
    answers = desk.turn(
        *(CheckInDevice(f"made up {number}", "a", Eligibility.of("a", message)) for number in range(16))
    )
    assert all(isinstance(one.exception(timeout=0), UnknownPopulation) for one in answers)
    assert len([text for text in statements if "SELECT" in text]) == 1


def test_a_device_is_judged_once_from_its_check_in_to_its_assignment(register, desk, monkeypatch):
    register(goal=1)
    judge, judged = Needs.unmet_by, []
    monkeypatch.setattr(Needs, "unmet_by", lambda needs, *device: judged.append(device) or judge(needs, *device))
    message = CheckIn(capabilities=CAPABILITIES, examples={"default": 10})
    command = CheckInDevice("phones", "a", Eligibility.of("a", message))
    assert desk.driver.turn_away(command) is None
    (waiting,) = desk.turn(AwaitAssignment(desk.ask(command).session, "a", 10))
    assert waiting.result(timeout=0).assignment
    assert len(judged) == 1


@every_engine
def test_device_is_answered_from_memory_while_the_database_cannot_be_read(store, register, desk, monkeypatch):
    register(goal=2)
    desk.turn()
    waiting = desk.wait("a", seconds=5)

    def unreadable():
        raise sqlalchemy.exc.OperationalError("SELECT", {}, Exception("the server closed the connection"))

    with monkeypatch.context() as patch:
        patch.setattr(store.database, "reading", unreadable)
        desk.pass_time(1)
        assert isinstance(desk.arrive("b"), Accepted)
        desk.pass_time(5)
        assert waiting.result(timeout=0).reason == "not-selected"
    desk.pass_time(1)
    assert {assignment.round for assignment in desk.assign("a", "b")} == {1}


def test_wait_that_runs_out_is_answered_and_ends_the_session(register, desk):
    register()
    session = desk.arrive("a").session
    (answer,) = desk.turn(AwaitAssignment(session, "a", 5))
    assert not answer.done()
    desk.pass_time(5)
    assert bare(answer.result(timeout=0)) == Rejected("not-selected", RETRY)
    with pytest.raises(UnknownSession):
        desk.ask(AwaitAssignment(session, "a", 5))


def test_newer_visit_of_a_device_supersedes_the_older(store, register, desk):
    task = register(goal=1, minimum=1, over_selection=2, selection_timeout_s=3)
    older, newer = desk.wait("a"), desk.wait("a")
    assert bare(older.result(timeout=0)) == Rejected("superseded", RETRY)
    desk.pass_time(3)
    assert newer.result(timeout=0).slot == 0
    assert [seat.device for seat in store.cohort(task, 1)] == ["a"]


def test_device_that_hung_up_is_not_selected_and_may_wait_again(register, desk):
    register(goal=2)
    session = desk.arrive("a").session
    (gone,) = desk.turn(AwaitAssignment(session, "a", 10))
    desk.ask(CancelWait(session, gone))
    other = desk.wait("b")
    assert not other.done()
    (again,) = desk.turn(AwaitAssignment(session, "a", 10))
    assert {again.result(timeout=0).slot, other.result(timeout=0).slot} == {0, 1}


def test_whoever_hangs_up_on_a_refused_wait_ends_no_other(register, desk):
    register(goal=2)
    session = desk.arrive("a").session
    (waiting,) = desk.turn(AwaitAssignment(session, "a", 10))
    for device in ("b", "a"):  # another device that knows the session's id; its owner, on a second connection
        (refused,) = desk.turn(AwaitAssignment(session, device, 10))
        assert refused.exception(timeout=0) is not None
        desk.ask(CancelWait(session, refused))
    desk.wait("c")
    assert waiting.result(timeout=0).round == 1


@every_engine
def test_lost_assignment_is_told_again_with_the_time_that_is_left(register, desk):
    register(goal=1, reporting_deadline_s=60)
    session = desk.arrive("a").session
    first = desk.ask(AwaitAssignment(session, "a", 1))
    desk.pass_time(20)
    again = desk.ask(AwaitAssignment(session, "a", 1))
    assert (again.assignment, first.report_within_s, again.report_within_s) == (first.assignment, 60, 40)


@pytest.mark.parametrize("end", ["pause", "cancel"])
def test_device_that_begins_to_wait_once_its_task_is_over_is_sent_away(store, register, desk, end):
    task = register(goal=1)
    session = desk.arrive("a").session
    getattr(store, end)(task)
    desk.pass_time(1)
    assert desk.ask(AwaitAssignment(session, "a", 30.0)).reason == "no-task"
