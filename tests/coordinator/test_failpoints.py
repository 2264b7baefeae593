"""`kill -9` at every durable step: what was accepted is neither lost nor counted twice, and the model is the same.

Three devices train over real HTTP, each on a quadratic of its own, from the checkpoint that they fetch. All numbers are
such that float32 holds them exactly, so the order in which reports come does not show in the model.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import pytest
import sqlalchemy

from coordinator.failpoints import FAILPOINTS, VARIABLE, reach
from coordinator.rules.entities import Regularly
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_settings import Buffered, PrivacyBudget, TaskSettings
from coordinator.store.database import Database
from coordinator.store.tables import ASSIGNMENTS, BLOBS, REPORTS
from coordinator.store.tasks import open_coordinator_store
from fedcore import checkpoint
from fedcore.params import VectorSpec
from fedcore.privacy.accounting import spent
from tests.coordinator import bundles
from tests.coordinator.replicas import Phones, replicas_on, until
from tests.forked import COMMAND, forked

pytestmark = pytest.mark.promise("Every readable noisy sum has one row in the ledger, and tasks keep their budget")

GOAL, ROUNDS = 4, 3
SERVING = [name for name in FAILPOINTS if name.partition(".")[0] in ("blob", "assignment", "report", "round")]
EVERY = [(engine, f"{name}:{n}") for engine in ("sqlite", "postgresql") for name in SERVING for n in range(1, 4)]
SOME = [
    ("sqlite", "blob.after-write:2"),
    ("sqlite", "report.after-commit:2"),
    ("postgresql", "assignment.before-commit:2"),
    ("postgresql", "round.before-commit:2"),
]
REGISTER = """
import sys
from pathlib import Path
import numpy as np
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from tests.coordinator.bundles import make_bundle
folder = Path(sys.argv[2])
with open_coordinator_store(sys.argv[1], folder / "blobs") as store:
    bundle = make_bundle(folder / "bundle", start=np.arange(4, dtype=np.float32))
    store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=1))
"""
MIGRATE = "import sys; from coordinator.store.database import Database; Database(sys.argv[1]).close()"


def killed_at(*some):
    """Runs a test at these failpoints of each engine, and at every other one among the long tests."""
    rest = [pytest.param(*one, marks=pytest.mark.long) for one in EVERY if one not in some]
    return pytest.mark.parametrize(("database", "failpoint"), [*some, *rest], indirect=["database"])


def target(slot):
    """What the device in that slot wants the model to be."""
    return np.array([slot, 2 * slot, -slot, 8], np.float32)


def trained():
    """The model after every round, by the equations."""
    model = bundles.START.copy()
    for _ in range(ROUNDS):
        model = model + np.mean([(target(slot) - model) / 2 for slot in range(GOAL)], axis=0, dtype=np.float64)
        model = model.astype(np.float32)
    return model


class Learners(Phones):
    """Devices that take one gradient step from the checkpoint they were given, and keep their receipts."""

    def __init__(self, count, urls):
        super().__init__(count, urls, self._note)
        self.receipts = []

    def _note(self, event, assignment):
        if event == "reported":
            self.receipts.append(assignment.assignment)

    def _train(self, client, assignment):
        answer = self._ask(client, "GET", f"/v1/blobs/{assignment.checkpoint.sha256}")
        data = assignment.checkpoint.check(answer.content)
        model = checkpoint.decode(data, [VectorSpec("params", bundles.START.size)])["params"]
        return bundles.report_body((target(assignment.slot) - model) / 2, 1)


@pytest.fixture
def replicas(coordinators, store, database, tmp_path):
    with replicas_on(coordinators, tmp_path, store, database) as started:
        yield started


def rows(store, query):
    with store.database.engine.connect() as connection:
        return connection.execute(query).all()


class PrivateLearners(Learners):
    """Devices whose report is the same every time; they note which checkpoint each round began with."""

    def __init__(self, count, urls):
        super().__init__(count, urls)
        self.begun = set()

    def _train(self, _, assignment):
        self.begun.add((assignment.round, assignment.checkpoint.sha256))
        return checkpoint.encode({"report": np.array([1, 0, 0, 0, 1], np.float32)})


def train(store, task, replicas, failpoint, kind=Learners):
    """Train to the end, through one death if there is a failpoint; answers the receipts that devices hold."""
    with_failpoint = {VARIABLE: failpoint} if failpoint else {}
    first = replicas.start(environment=with_failpoint)
    with kind(GOAL, lambda: [first.url]) as devices:
        if failpoint:
            first.ended()
            replicas.alive.remove(first)
            replicas.start(port=int(first.url.rpartition(":")[2]))
        until(lambda: store.task(task).state is TaskState.COMPLETED, 60)
    assert devices.problems == []
    return devices


@pytest.mark.promise("After `kill -9` at any durable step the model is bit for bit that of an undisturbed run")
@killed_at(("sqlite", ""), ("postgresql", ""), *SOME)
def test_killed_training_ends_with_the_model_of_an_undisturbed_one(store, register, replicas, failpoint):
    task = register(goal=GOAL, rounds=ROUNDS)
    receipts = train(store, task, replicas, failpoint).receipts
    assert store.checkpoint(task)["params"].tobytes() == trained().tobytes()
    done = [one for one in store.rounds(task) if one.state is RoundState.COMMITTED]
    assert [(one.number, one.reported) for one in done] == [(number, GOAL) for number in range(1, ROUNDS + 1)]
    counted = sqlalchemy.select(ASSIGNMENTS.c.slot).join(REPORTS).order_by(ASSIGNMENTS.c.slot)
    for one in done:
        assert [row.slot for row in rows(store, counted.where(ASSIGNMENTS.c.round == one.id))] == list(range(GOAL))
    assert set(receipts) <= {row.assignment for row in rows(store, sqlalchemy.select(REPORTS.c.assignment))}
    assert len(store.rounds(task)) <= ROUNDS + bool(failpoint) * 2
    for (digest,) in rows(store, sqlalchemy.select(BLOBS.c.sha256)):
        assert store.blobs.get(digest)


@pytest.mark.promise("After `kill -9` every version of a buffered model has exactly the reports in its rows")
@killed_at(("sqlite", "round.after-commit:2"), ("postgresql", "round.before-commit:2"))
def test_killed_buffers_lose_no_version_and_count_no_report_twice(store, register, replicas, tmp_path, failpoint):
    bundle = bundles.make_bundle(
        tmp_path / "fedbuff", bundles.make_plan(weighting="uniform"), "fedbuff", start=bundles.START
    )
    task = register(bundle, goal=2, rounds=5, buffered=Buffered(concurrency=GOAL, max_staleness=3))
    receipts = train(store, task, replicas, failpoint).receipts
    models, counted = [bundles.START.astype(np.float64)], []
    for number in range(1, 6):
        in_sum = store.counted(task, number)
        steps = [(1 + number - one.number) ** -0.5 * (target(one.slot) - models[one.number - 1]) / 2 for one in in_sum]
        models.append(models[-1] + sum(steps) / 2)
        counted += [one.id for one in in_sum]
        assert len({one.device for one in in_sum}) == len(in_sum) == 2
    np.testing.assert_allclose(store.checkpoint(task)["params"], models[-1], rtol=1e-5)
    assert len(set(counted)) == len(counted) == 10
    assert set(receipts) <= {row.assignment for row in rows(store, sqlalchemy.select(REPORTS.c.assignment))}


@killed_at(("sqlite", "round.before-commit:2"), ("postgresql", "round.after-commit:2"))
def test_killed_private_training_has_a_row_for_every_model(store, register, replicas, tmp_path, failpoint):
    privacy = PrivacyBudget(epsilon=8, delta=1e-6, users=1000, noise_multiplier=2, mechanism="gaussian")
    task = register(bundles.make_private_bundle(tmp_path / "private"), goal=GOAL, rounds=99, privacy=privacy)
    devices = train(store, task, replicas, failpoint, PrivateLearners)
    with store.database.reading() as records:
        entries, epsilons = records.ledger.entries(task), records.ledger.spent(task)
    done = [one for one in store.rounds(task) if one.state is RoundState.COMMITTED]
    assert [(row.round, row.devices) for row in entries] == [(one.number, GOAL) for one in done]
    assert [one.epsilon for one in epsilons] == [spent(entries[: n + 1], 1e-6) for n in range(len(entries))]
    assert spent([*entries, entries[-1]], 1e-6) > 8 >= epsilons[-1].epsilon
    released = [store.task(task).initial.checkpoint_sha256, *[one.checkpoint_sha256 for one in done]]
    assert devices.begun <= set(enumerate(released, 1))


@killed_at(("sqlite", "round.after-commit:2"), ("postgresql", "round.before-commit:2"))
def test_killed_training_starts_the_evaluation_of_every_round_once(store, bundle, replicas, tmp_path, failpoint):
    given = {"population": "phones", "goal": GOAL, "rounds": ROUNDS, "over_selection": 1.0, "hold_out_devices": 1e-9}
    regular = Regularly(1, bundles.make_evaluation_bundle(tmp_path / "evaluation"))
    task = store.register_task(bundle, TaskSettings(**given), evaluation=regular).id
    train(store, task, replicas, failpoint)
    made = store.evaluations(task)
    assert [one.round for one in made] == list(range(1, ROUNDS + 1))
    for one in made:
        params = [store.checkpoint(*which)["params"] for which in ((one.task, 0), (task, one.round))]
        assert params[0].tobytes() == params[1].tobytes()


def die(program, failpoint, *arguments):
    """Run a program that must die at a failpoint."""
    done = forked(COMMAND).run(
        [sys.executable, "-c", program, *map(str, arguments)], env=os.environ | {VARIABLE: failpoint}
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.every_engine
@pytest.mark.parametrize(
    ("failpoint", "tasks"), [("blob.before-name:3", 0), ("task.before-commit", 0), ("task.after-commit", 1)]
)
def test_task_whose_registration_was_killed_is_whole_or_absent(store, database, tmp_path, register, failpoint, tasks):
    die(REGISTER, failpoint, database, tmp_path)
    assert len(store.tasks()) == tasks
    for (digest,) in rows(store, sqlalchemy.select(BLOBS.c.sha256)):
        assert store.blobs.get(digest)
    register(bundles.make_bundle(tmp_path / "again", start=np.arange(4, dtype=np.float32)), goal=1, rounds=1)
    assert len(store.tasks()) == tasks + 1


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_database_whose_making_was_killed_is_made_at_the_next_start(request, tmp_path, engine, moment):
    url = f"sqlite:///{tmp_path}/m.db"
    if engine == "postgresql":
        url = request.getfixturevalue("postgresql").without_tables()
    die(MIGRATE, f"migration.{moment}-commit", url)
    with open_coordinator_store(url, tmp_path / "blobs") as store:
        assert store.tasks() == []
    Database(url, create=False).close()


def test_failpoint_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv(VARIABLE, "round.befor-commit")
    with pytest.raises(ValueError, match=r"no failpoint 'round\.befor-commit'"):
        reach("round.before-commit")
