"""A task of two trips: rounds take them in turn, each with its own layout, broadcast and update."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from coordinator.commands import CountReport
from coordinator.errors import InvalidTask, UnknownRound
from coordinator.rules.kinds import check_rollback
from coordinator.rules.states import TaskState
from fedcore import algorithms
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, PassPlan, TripPlan
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Loop
from tests.coordinator.bundles import START, make_bundle, make_plan
from tests.coordinator.conftest import states

SETTINGS = {"server_lr": 1.0}
MODEL, GRADIENT = VectorSpec("params", 4), VectorSpec("gradient", 4)


def trip(name, segment, *broadcast):
    metrics = Segment(f"{name}.metrics", 2, "sum", ("examples", "loss"))
    graphs = {part: BlobRef.of(part.encode()) for part in (f"{name}.begin", f"{name}.step", "report")}
    return {
        "broadcast": broadcast,
        "passes": (PassPlan(name, Loop(batch_size=2), (MODEL,), ("loss",)),),
        "report": ReportLayout((Segment(segment, 4, "mean"), Segment("weight", 1, "sum"), metrics), "uniform"),
        "graphs": {"onnx": graphs},
    }


SWEEP, TRAIN = trip("sweep", "gradient", MODEL), trip("train", "delta", MODEL, GRADIENT)
PLAN = msgspec.structs.replace(make_plan(), **SWEEP, second=TripPlan(**TRAIN))
GRAPHS = [part.encode() for part in ("train.begin", "train.step", "sweep.begin", "sweep.step", "report")]


@pytest.fixture
def bundle(tmp_path):
    return make_bundle(tmp_path / "two", PLAN, "feddane", SETTINGS, graphs=GRAPHS)


def report(desk, given, values):
    layout = PLAN.of_round(given.round).report
    name = layout.means[0].name
    parts = {name: np.array(values, np.float32)} | {
        segment.name: np.ones(2, np.float32) for segment in layout.segments if segment.labels
    }
    vector = layout.weigh(layout.concatenate(parts, 1.0), 1.0)
    return desk.ask(CountReport(given.assignment, vector.tobytes().hex()[:64], vector))


def run_rounds(desk, *values):
    for one in values:
        (given,) = desk.assign(f"device-{desk.now}")
        report(desk, given, one)
        desk.pass_time(1)


@pytest.mark.every_engine
def test_rounds_take_the_trips_in_turn(store, register, desk, bundle):
    task = register(bundle, goal=1, rounds=4)
    run_rounds(desk, [1, 2, 3, 4])
    first = store.checkpoint(task)
    np.testing.assert_array_equal(first["params"], START)
    np.testing.assert_array_equal(first["gradient"], [1, 2, 3, 4])
    run_rounds(desk, [0.5, 0, 0, 0])
    second = store.checkpoint(task)
    assert list(second) == ["params"]
    np.testing.assert_array_equal(second["params"], START + np.array([0.5, 0, 0, 0], np.float32))
    run_rounds(desk, [5, 6, 7, 8], [0, 1, 0, 0])
    np.testing.assert_array_equal(store.checkpoint(task, 3)["gradient"], [5, 6, 7, 8])
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0.5, 1, 0, 0], np.float32))
    assert store.task(task).state is TaskState.COMPLETED
    assert [list(one.metrics) for one in store.rounds(task)] == [["sweep.loss"], ["train.loss"]] * 2


def test_an_attempt_that_failed_is_tried_again_as_the_same_trip(store, register, desk, bundle):
    task = register(bundle, goal=1, rounds=2)
    run_rounds(desk, [1, 1, 1, 1])
    (given,) = desk.assign("gives-up")
    desk.give_up(given)
    desk.pass_time(60)
    (again,) = desk.assign("other")
    assert (again.round, again.attempt) == (2, 2)
    report(desk, again, [1, 0, 0, 0])
    desk.pass_time(1)
    assert [state for *_, state, _ in states(store, task)] == ["committed", "abandoned", "committed"]
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([1, 0, 0, 0], np.float32))


@pytest.mark.every_engine
def test_rollback_goes_to_a_round_that_the_next_trip_follows(store, register, desk, bundle):
    task = register(bundle, goal=1, rounds=8)
    run_rounds(desk, [1, 1, 1, 1], [1, 0, 0, 0], [2, 2, 2, 2], [0, 1, 0, 0])
    store.pause(task)
    with pytest.raises(UnknownRound, match="does not go on from round 2; round 3 led to the same model"):
        store.roll_back(task, 2)
    store.roll_back(task, 3)
    model = START + np.array([1, 0, 0, 0], np.float32)
    np.testing.assert_array_equal(store.checkpoint(task)["params"], model)
    np.testing.assert_array_equal(store.checkpoint(task)["gradient"], [2, 2, 2, 2])
    store.resume(task)
    desk.pass_time(1)
    run_rounds(desk, [0, 0, 1, 0])
    assert store.rounds(task)[-1].metrics.keys() == {"train.loss"}
    np.testing.assert_array_equal(store.checkpoint(task)["params"], model + np.array([0, 0, 1, 0], np.float32))


@pytest.mark.parametrize(("last", "to"), [(5, 4), (5, 0), (4, 3), (4, 1)])
def test_a_round_that_the_next_trip_follows_may_be_rolled_back_to(last, to):
    check_rollback(last, to, 2)


@pytest.mark.parametrize(("last", "to", "same"), [(5, 3, 2), (4, 2, 3), (4, 0, 1)])
def test_any_other_is_refused_and_the_round_of_the_same_model_named(last, to, same):
    with pytest.raises(UnknownRound, match=f"from round {to}; round {same} led to the same model"):
        check_rollback(last, to, 2)
    check_rollback(last, same, 2)


def test_a_plan_and_an_algorithm_of_other_trips_are_refused(store, register, tmp_path):
    with pytest.raises(InvalidTask, match="the algorithm has 2 trips, the plan 1"):
        register(make_bundle(tmp_path / "one", algorithm="feddane"))
    with pytest.raises(InvalidTask, match="the algorithm has 1 trips, the plan 2"):
        register(make_bundle(tmp_path / "two", PLAN, "fedavg", {"weighting": "uniform"}))


def test_a_second_trip_that_does_not_fit_is_refused(register, tmp_path):
    wrong = msgspec.structs.replace(PLAN, second=TripPlan(**TRAIN | {"broadcast": (MODEL,)}))
    with pytest.raises(InvalidTask, match="the plan expects"):
        register(make_bundle(tmp_path / "two", wrong, "feddane", SETTINGS))


def test_the_server_state_of_every_round_is_the_algorithms(store, register, desk, bundle):
    task = register(bundle, goal=1, rounds=2)
    run_rounds(desk, [1, 2, 3, 4], [1, 1, 1, 1])
    known = set(algorithms.create("feddane").init(START))
    assert set(store.checkpoint(task, 1)) == known
