"""Tasks whose devices keep vectors between rounds: what a task needs, who takes part, what devices are told."""

import msgspec
import numpy as np
import pytest

from coordinator.errors import InvalidTask, TaskEnded
from coordinator.rules.progress import OBSTACLES
from coordinator.rules.states import RoundState
from coordinator.rules.task_settings import Buffered, ClearReports
from fedcore import checkpoint
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.rehearsal import moves_by_participation
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef
from fedcore.report import Segment
from fedcore.wire import messages
from fedcore.wire.messages import Settled
from tests.coordinator.bundles import GRAPHS, make_bundle, make_plan
from tests.coordinator.conftest import committed
from tests.coordinator.devices import CAPABILITIES
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, check_in, put, refused

KEEPS = {"keeps_vectors": True}


def kept_plan():
    segments = (Segment("delta", 4, "mean"), Segment("delta_c", 4, "mean"), Segment("weight", 1, "sum"))
    plan = make_plan(4, (VectorSpec("params", 4), VectorSpec("c", 4)), segments, "uniform")
    graphs = {name: BlobRef.of(name.encode()) for name in (*GRAPHS, "kept.first", "kept.next")}
    return msgspec.structs.replace(plan, kept=(VectorSpec("c_i", 4),), graphs={"onnx": graphs})


@pytest.fixture
def scaffold(tmp_path):
    return make_bundle(tmp_path / "scaffold", kept_plan(), "scaffold", graphs=[b"kept.first", b"kept.next"])


def body(delta, delta_c):
    values = np.array([*delta, *delta_c, 1], np.float32)
    return checkpoint.encode({"report": values})


@pytest.fixture
def keeping(client, monkeypatch):
    """A client whose devices say that they keep vectors."""
    monkeypatch.setattr("tests.coordinator.test_api.CAPABILITIES", msgspec.structs.replace(CAPABILITIES, **KEEPS))
    return client


def settled(client, assignment):
    answer = client.get(f"/v1/assignments/{assignment}/outcome", auth=client.devices.owner(assignment))
    return messages.decode(answer.content, Settled)


def test_the_share_of_all_clients_moves_exactly_these_algorithms():
    assert {name for name in ALGORITHMS if moves_by_participation(create(name))} == {"scaffold", "feddyn"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "algorithm scaffold moves by the share of all devices .* say with clients how many"),
        ({"clients": 1}, "clients must be at least the goal, 2: .* not 1"),
        ({"clients": 9, "clear": ClearReports(estimator="median")}, "estimator must be mean with clients"),
        ({"clients": 9, "buffered": Buffered()}, "scaffold keeps vectors on devices.* without buffered"),
    ],
)
def test_a_task_that_cannot_be_right_is_refused_with_what_to_change(store, register, scaffold, settings, says):
    with pytest.raises(InvalidTask, match=says):
        register(scaffold, **settings)
    assert store.tasks() == []


def test_the_number_of_clients_is_refused_where_nothing_asks_for_it(register):
    with pytest.raises(InvalidTask, match="clients must be left out with fedavg, not 9"):
        register(clients=9)


def test_a_plan_that_keeps_other_vectors_than_its_algorithm_is_refused(register, tmp_path):
    other = msgspec.structs.replace(kept_plan(), kept=(VectorSpec("c_i", 3),))
    bundle = make_bundle(tmp_path / "other", other, "scaffold", graphs=[b"kept.first", b"kept.next"])
    with pytest.raises(InvalidTask, match=r"the algorithm keeps .*size=4.* on devices, the plan .*size=3"):
        register(bundle, clients=9)


def test_a_runtime_that_keeps_nothing_is_not_drawn_and_progress_says_so(store, register, scaffold, desk):
    task = register(scaffold, clients=9)
    desk.turn()
    rejected = desk.arrive("a")
    assert rejected.reason == "not-eligible"
    desk.pass_time(61)
    assert store.progress_of(task).sentence.endswith(f"rejected lately: 1 {OBSTACLES['keeps-nothing']}")


def test_devices_hear_what_became_of_their_round_and_no_others(store, register, scaffold, keeping):
    client = keeping
    task = register(scaffold, goal=2, minimum=2, rounds=2, clients=8)
    one, two = (given.assignment for given in assign(client, "a", "b"))
    assert settled(client, one) == Settled(counted=None, over=False)
    assert put(client, one, body([1, 2, 3, 4], [8, 0, 0, 0])).status_code == 200
    assert settled(client, one) == Settled(counted=None, over=False)
    assert put(client, two, body([1, 2, 3, 4], [0, 8, 0, 0])).status_code == 200
    committed(store, task, 1)
    assert [settled(client, given) for given in (one, two)] == [Settled(counted=True, over=False)] * 2
    state = store.checkpoint(task)
    assert state["params"].tolist() == [2, 4, 6, 8]  # START and the mean
    assert state["c"].tolist() == [1, 1, 0, 0]  # the mean of both, times 2 of 8 clients
    answer = client.get(f"/v1/assignments/{one}/outcome", auth=client.devices["c"])
    refused(answer, "foreign-assignment")
    refused(client.get("/v1/assignments/none/outcome", auth=client.devices["a"]), "unknown-assignment")


def test_reports_of_an_abandoned_attempt_do_not_count(store, register, scaffold, keeping):
    client = keeping
    task = register(scaffold, goal=2, minimum=2, rounds=2, clients=8)
    one, two = (given.assignment for given in assign(client, "a", "b"))
    assert put(client, one, body([1, 2, 3, 4], [8, 0, 0, 0])).status_code == 200
    client.post(f"/v1/assignments/{two}:abort", content=b'{"reason": "conditions"}', auth=client.devices.owner(two))
    until(lambda: store.rounds(task)[0].state is RoundState.ABANDONED, 30)
    assert [settled(client, given) for given in (one, two)] == [Settled(counted=False, over=False)] * 2
    store.cancel(task)
    assert settled(client, one) == Settled(counted=False, over=True)


def test_a_rollback_that_devices_would_not_follow_is_refused(store, register, scaffold):
    task = register(scaffold, clients=9)
    store.pause(task)
    with pytest.raises(TaskEnded, match=f"devices keep vectors for task {task}, .* start another task from that model"):
        store.roll_back(task, 0)


def test_check_ins_say_whether_a_runtime_keeps_vectors(register, scaffold, client):
    register(scaffold, clients=9)
    assert check_in(client, "a").json()["reason"] == "not-eligible"
    assert check_in(client, "b", **KEEPS).json()["outcome"] == "accepted"
