"""Vectors that devices keep between rounds: a real process and a real coordinator, killed at every durable step."""

import json
import signal
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs

from device_runtime.backends import open_backend
from device_runtime.conditions import Clock
from device_runtime.errors import BadAnswer, PlanRefused, Refused
from device_runtime.sandbox.process import Sandbox
from device_runtime.state.assignment import KEPT_S, MOST_ASKED, KeptVectors
from device_runtime.state.database import open_database
from device_runtime.state.folder import KeyFile, Sealer
from device_runtime.trainer import InProcess, Job, Limits
from export.build import build_plan
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.batching import StreamKey
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef
from fedcore.wire.messages import Assignment, Settled
from simulator import datasets
from tests.device_runtime.process import held_at, kill, muster, until
from tests.forked import DEVICE, forked
from tests.sampled import sampled

FIRST, SECOND = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
SESSION = """
import os, signal, sys
from device_runtime.state import database
from muster.cli import main

at, place = sys.argv.pop(1), int(sys.argv.pop(1))
execute, calls = database.StateDatabase.execute, []

def dying(self, sql, *values):
    ours = " kept" in sql and not sql.startswith("SELECT")
    calls.extend([sql] * ours)
    if ours and len(calls) == place and at == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    rows = execute(self, sql, *values)
    if ours and len(calls) == place and at == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return rows

database.StateDatabase.execute = dying
main()
"""


@pytest.fixture
def silence_s():
    """Long: no device is lost while its process ends and another one starts, however slow the machine is."""
    return 600.0


@pytest.fixture(scope="session")
def scaffold(tmp_path_factory):
    """A folder of plans: one that keeps a control variate."""
    folder = tmp_path_factory.mktemp("scaffold")
    muster("export", "logreg", "--algorithm", "scaffold", "--set", "batch_size=8", "--out", folder / "scaffold")
    return folder


@pytest.fixture
def keeping(world, scaffold):
    """The world of a task with two clients, of which one is here, over three rounds."""
    world.plans = scaffold
    world.create("scaffold", "--clients", 2, "--rounds", 3, "--selection-timeout-s", 2)
    return world


def kept(world):
    """The row of the task: round, attempt, and the bytes of what counts and of what does not yet."""
    with closing(sqlite3.connect(f"file:{world.state / 'state.db'}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT round, attempt, current, pending FROM kept").fetchall()
    assert len(rows) <= 1
    return rows[0] if rows else None


def dying(world, at, place):
    """A session in a process that kills itself before or after a change of what is kept; its return code."""
    command = [sys.executable, "-c", SESSION, at, str(place), "device", "run", "--once", "--json"]
    command += ["--coordinator", world.road.url, "--population", "p", "--examples", str(world.folder / "mine.npz")]
    done = forked(DEVICE).run([*command, "--state", str(world.state)])
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def committed(world, count):
    until(lambda: sum(one["state"] == "committed" for one in world.rounds()) == count)


def test_what_a_round_made_counts_once_the_device_learns_that_it_did(keeping):
    assert keeping.once()["outcome"] == "reported"
    number, attempt, current, first = kept(keeping)
    assert (number, attempt, current) == (1, 1, None)
    assert first is not None
    committed(keeping, 1)
    assert keeping.once()["outcome"] == "reported"
    number, _, current, second = kept(keeping)
    assert (number, current) == (2, first)
    assert second not in (None, first)
    committed(keeping, 2)
    assert keeping.once()["outcome"] == "reported"
    committed(keeping, 3)
    assert keeping.once()["reason"] == "no-task"
    assert kept(keeping) is None  # the task is over


def test_a_report_that_never_counted_changes_nothing(keeping):
    assert keeping.once()["outcome"] == "reported"
    committed(keeping, 1)
    _, _, _, first = kept(keeping)
    target = keeping.road.target
    keeping.road.before["report"] = [lambda: setattr(keeping.road, "target", "127.0.0.1:9")]
    assert keeping.once()["outcome"] == "failed"
    _, _, current, pending = kept(keeping)
    assert (current, pending is None) == (first, False)
    keeping.road.target = target
    with closing(sqlite3.connect(keeping.state / "state.db")) as database, database:
        database.execute("DELETE FROM assignment")  # as if its deadline were over
    outcome = keeping.once()
    assert (outcome["outcome"], outcome["reason"]) == ("rejected", "unwilling")
    assert f"not known yet whether round 2 of task {keeping.task}, attempt 1, counts" in outcome["detail"]
    assert keeping.road.calls.count("assignment") == 2
    muster("task", "pause", keeping.task, *keeping.where)
    muster("task", "cancel", keeping.task, *keeping.where)
    until(lambda: keeping.once()["reason"] == "no-task")
    assert kept(keeping) is None


# A session that keeps something for the first time changes the table once, the next one takes that over first.
DURABLE = [("before", 1, 0), ("after", 1, 0), ("before", 1, 1), ("after", 1, 1), ("before", 2, 1), ("after", 2, 1)]


@pytest.mark.promise("Vectors that a device keeps move by committed rounds that counted its report, once each")
@pytest.mark.parametrize(("at", "place", "rounds"), sampled(DURABLE, DURABLE[-2:]))
def test_killed_at_a_durable_step_it_loses_and_doubles_nothing(keeping, at, place, rounds):
    expected = _undisturbed(keeping, rounds)
    assert dying(keeping, at, place)[0] == -signal.SIGKILL
    sent = keeping.road.reports.copy()
    for _ in range(6):
        outcome = keeping.once()
        if outcome["outcome"] == "reported":
            break
    assert outcome["round"] == rounds + 1
    committed(keeping, rounds + 1)
    assert len(keeping.road.reports) == len(sent) + 1
    number, _, current, pending = kept(keeping)
    assert (number, current is None, pending is None) == (rounds + 1, rounds == 0, False)
    assert current == (expected if rounds else None)


def _undisturbed(world, rounds):
    """The sealed bytes of what counts, after rounds that nothing disturbed."""
    for number in range(1, rounds + 1):
        assert world.once()["outcome"] == "reported"
        committed(world, number)
    return kept(world)[3] if rounds else None


def test_there_are_as_many_durable_steps_as_are_tested(keeping):
    _undisturbed(keeping, 1)
    code, out = dying(keeping, "before", 3)
    assert (code, json.loads(out)["outcome"]) == (0, "reported")


@pytest.mark.parametrize("answered", [False, True])
def test_killed_around_its_report_the_device_learns_the_truth(keeping, answered):
    device, _ = held_at(keeping, "report", answered=answered)
    kill(device)
    assert keeping.once()["outcome"] == "reported"  # the same report, counted once
    committed(keeping, 1)
    _, _, _, first = kept(keeping)
    assert keeping.once()["outcome"] == "reported"
    assert kept(keeping)[2] == first


@pytest.fixture
def store(tmp_path):
    """What is kept in a state folder, and its clock, whose time a test sets."""
    now = [1000.0]
    clock = Clock(lambda: now[0], lambda: now[0], "this boot")
    sealer = Sealer(KeyFile(tmp_path / "key"))
    with open_database(tmp_path, clock) as database:
        opened = KeptVectors(database, sealer, clock, "https://c.example", "phones")
        opened.database, opened.now, opened.clock, opened.key = database, now, clock, tmp_path / "key"
        yield opened


def given(assignment="a-1", plan="0" * 64, number=1):
    made_of = BlobRef("1" * 64, 10)
    return Assignment(
        assignment=assignment, task="t-1", round=number, attempt=1, slot=0, seed=0, plan=BlobRef(plan, 1),
        checkpoint=made_of, report_within_s=9.0,
    )  # fmt: skip


def keeps(store, vectors, assignment, counted):
    store.put(assignment, {"c_i": vectors})
    return store.settle_all(lambda name: Settled(counted=counted, over=False))


PLAN = SimpleNamespace(kept=(VectorSpec("c_i", 2),))


def test_only_rounds_that_count_move_what_is_kept(store):
    assert store.of(given(), PLAN) is None
    assert keeps(store, FIRST, given("a-1"), counted=False) == {}
    assert store.of(given(), PLAN) is None
    keeps(store, FIRST, given("a-2"), counted=True)
    assert store.of(given(), PLAN)["c_i"].tolist() == FIRST.tolist()
    keeps(store, SECOND, given("a-3", number=2), counted=False)
    assert store.of(given(), PLAN)["c_i"].tolist() == FIRST.tolist()
    keeps(store, SECOND, given("a-4", number=2), counted=True)
    assert store.of(given(), PLAN)["c_i"].tolist() == SECOND.tolist()


def test_while_a_round_is_open_its_task_is_refused_and_others_are_not(store):
    assert list(keeps(store, FIRST, given(), counted=None)) == ["t-1"]
    with pytest.raises(PlanRefused, match="how the last round of task t-1 ended is not known here yet"):
        store.of(given("a-2"), PLAN)
    assert store.of(structs.replace(given("a-2"), task="t-2"), PLAN) is None


@pytest.mark.parametrize(
    "error", [Refused(404, "not-found", "no such path"), Refused(500, "internal", "a fault"), BadAnswer("a page")]
)
def test_a_round_that_nobody_tells_about_holds_up_its_own_task_only(store, error):
    def ask(assignment):
        if assignment == "a-1":
            raise error
        return Settled(counted=True, over=False)

    store.put(given("a-1"), {"c_i": FIRST})
    store.put(structs.replace(given("a-2"), task="t-2"), {"c_i": SECOND})
    waits = store.settle_all(ask)
    assert list(waits) == ["t-1"]
    assert waits["t-1"].endswith(f"counts with this device's report: {error.detail}")
    assert store.of(structs.replace(given("a-3"), task="t-2"), PLAN)["c_i"].tolist() == SECOND.tolist()
    assert store.settle_all(lambda name: Settled(counted=True, over=False)) == {}
    assert store.of(given("a-3"), PLAN)["c_i"].tolist() == FIRST.tolist()


def test_a_session_asks_about_a_bounded_number_of_rounds(store):
    tasks = {f"t-{number}" for number in range(MOST_ASKED + 4)}
    for task in tasks:
        store.put(structs.replace(given(f"a-{task}"), task=task), {"c_i": FIRST})
    asked = []

    def ask(assignment):
        asked.append(assignment)
        return Settled(counted=None, over=False)

    assert set(store.settle_all(ask)) == tasks
    assert len(asked) == MOST_ASKED
    for _ in range(50):  # no round is asked about in vain for ever before another one's turn
        store.settle_all(ask)
    assert {f"a-{task}" for task in tasks} == set(asked)


def test_a_task_of_the_same_name_elsewhere_counts_in_what_is_kept(store):
    other = KeptVectors(store.database, Sealer(KeyFile(store.key)), store.clock, "https://other.example", "phones")
    store.put(given(), {"c_i": FIRST})
    alone = store.bytes_besides("t-2")
    assert alone > FIRST.nbytes
    assert (store.bytes_besides("t-1"), other.bytes_besides("t-1")) == (0, alone)


def test_a_kept_state_of_another_plan_is_one_line_and_nothing_is_lost(store):
    keeps(store, FIRST, given(), counted=True)
    with pytest.raises(
        PlanRefused, match=r"what is kept for task t-1 is of plan 000000000000…, not of 222222222222…"
    ) as said:
        store.of(given("a-2", plan="2" * 64), PLAN)
    assert "\n" not in str(said.value)
    assert store.of(given("a-3"), PLAN)["c_i"].tolist() == FIRST.tolist()


def test_what_is_damaged_is_forgotten_with_a_word_and_begins_anew(store):
    keeps(store, FIRST, given(), counted=True)
    store.database.execute("UPDATE kept SET current = ?", b"other bytes")
    with pytest.raises(PlanRefused, match="task t-1 is damaged, and forgotten"):
        store.of(given("a-2"), PLAN)
    assert store.of(given("a-2"), PLAN) is None


def test_what_was_not_used_for_long_is_forgotten(store):
    keeps(store, FIRST, given(), counted=True)
    store.now[0] += KEPT_S - 1
    store.settle_all(pytest.fail)
    assert store.of(given(), PLAN) is not None
    store.now[0] += 2
    store.settle_all(pytest.fail)
    assert store.of(given(), PLAN) is None


def test_what_was_kept_by_a_clock_ahead_is_forgotten_as_soon(store):
    store.now[0] = 1e9
    keeps(store, FIRST, given(), counted=True)
    store.now[0] = 1000.0
    restarted = KeptVectors(
        store.database, Sealer(KeyFile(store.key)), replace(store.clock, boot="the next boot"), *store._key
    )
    restarted.settle_all(pytest.fail)
    store.now[0] += KEPT_S - 1
    restarted.settle_all(pytest.fail)
    assert restarted.of(given(), PLAN) is not None
    store.now[0] += 2
    restarted.settle_all(pytest.fail)
    assert restarted.of(given(), PLAN) is None


def test_a_task_that_is_over_is_forgotten(store):
    store.put(given(), {"c_i": FIRST})
    assert store.settle_all(lambda name: Settled(counted=True, over=True)) == {}
    assert store.database.execute("SELECT * FROM kept") == []


def test_more_than_the_policy_lets_tasks_keep_is_refused_loudly(keeping):
    (keeping.state).mkdir(exist_ok=True)
    (keeping.state / "policy.toml").write_text("state_bytes = 5199\n")  # two vectors of 650 values have 5,200 bytes
    outcome = keeping.once()
    assert (outcome["outcome"], outcome["reason"]) == ("aborted", "plan-refused")
    assert "against state_bytes of this device's policy: 5200 found, 5199 allowed" in outcome["detail"]
    assert kept(keeping) is None
    (keeping.state / "policy.toml").write_text("state_bytes = 5200\n")
    assert keeping.once()["outcome"] == "reported"


@pytest.mark.parametrize("kept_before", [False, True])
def test_the_sandbox_takes_and_gives_what_is_kept(kept_before):
    model, algorithm = Model(load("logreg")), create("scaffold", {"batch_size": 8})
    plan, blobs = build_plan(model, algorithm)
    shard = datasets.load("digits").shard(0)
    before = {"c_i": np.linspace(-0.1, 0.1, 650, dtype=np.float32)} if kept_before else None
    job = Job(
        plan=plan,
        graphs={name: blobs[ref] for name, ref in plan.graphs["onnx"].items()},
        broadcast={"params": model.initial, "c": np.full(650, 0.01, np.float32)},
        examples={field.name: shard[field.name] for field in plan.examples.fields},
        key=StreamKey(1, 2, 3),
        kept=before,
    )
    limits = Limits(2**30, 60.0)
    inside = InProcess(open_backend("onnxruntime")).train(job, limits, lambda: True)
    apart = Sandbox("onnxruntime").train(job, limits, lambda: True)
    assert apart.kept["c_i"].tobytes() == inside.kept["c_i"].tobytes()
    assert apart.values.tobytes() == inside.values.tobytes()
    c_i = before["c_i"] if before else np.zeros(650, np.float32)
    layout = plan.report
    report = dict(zip((spec.name for spec in layout.means), np.split(inside.values[:1300], 2), strict=True))
    np.testing.assert_allclose(inside.kept["c_i"] - c_i, report["delta_c"], atol=1e-6)
