"""Devices that keep vectors, on a fleet that goes wrong, and in the engine: the same model, as the same rounds count.

Only what a committed round counted may move what a device keeps. Were one pending vector taken over too early, too late
or twice, c would differ from the mean of all c_i, and the models of later rounds with it.
"""

import numpy as np
import pytest
import sqlalchemy

from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.store import tables
from coordinator.store.tasks import Secagg, TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.signing import SigningKey
from muster.local.fleet import local_fleet
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.profile import Kind
from simulator.proofs import counted_cohort, replay, worst_difference
from tests.coordinator.fork_server import free_port, runs, wait_until
from tests.simulator.federation import SEED, rounding_error

USERS, GOAL, ROUNDS = 10, 8, 4
TOLERANCE = 1e-5
STEADY = (Kind(name="steady"),)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """The bundle of a model and an algorithm, which the tests of one algorithm share."""
    made = {}

    def bundle(model, algorithm):
        if algorithm.name not in made:
            made[algorithm.name] = export_bundle(model, algorithm, tmp_path_factory.mktemp(algorithm.name))
        return made[algorithm.name]

    return bundle


def with_one(**failing):
    """Kinds of a cohort of which one device fails in every session."""
    return Kind(name="steady", weight=GOAL - 1), Kind(name="failing", **failing)


class World:
    """A task of an algorithm that keeps vectors for a few devices, and what came of it."""

    def __init__(self, folder, bundles, name="scaffold", local="", **settings):
        self.folder = folder
        self.users, _ = datasets.users("digits", None, USERS)
        self.model = Model(load("logreg", (1, 8, 8), 10).with_local(local), SEED)
        self.algorithm = create(name, {"batch_size": 5, "client_lr": 0.1})
        self.bundle = bundles(self.model, self.algorithm)
        self.key = SigningKey.new(folder / "release.pem")
        given = {"population": "p", "goal": GOAL, "rounds": ROUNDS, "over_selection": 1.0}
        given |= {"clients": USERS} if name == "scaffold" else {}
        self.settings = TaskSettings(**given | settings, seed=SEED)
        self.clients = {}

    def train(self, local, kinds=STEADY, users=range(USERS), sessions=None):
        some = self.users.subset(users)
        how = {"kinds": kinds, "sessions": sessions}
        fleet = local_fleet(local, self.settings, some, self.key, self.folder / "devices", **how)
        self.clients |= fleet.run().clients

    def agreement(self, local, task):
        """The distance of the engine's models from the fleet's, and the cohorts that it replayed."""
        wait_until(lambda: local.store.task(task).state is TaskState.COMPLETED)
        numbers = range(1, ROUNDS + 1)
        cohorts = [counted_cohort(local.store, task, number, self.clients) for number in numbers]
        models = [local.store.checkpoint(task, number)["params"] for number in numbers]
        return worst_difference(self.engine(), self.users, cohorts, models), cohorts, models

    def engine(self):
        return Engine(self.model, self.algorithm, self.users, seed=SEED)


def reported_in_vain(store):
    """Reports that had a receipt in attempts that were abandoned."""
    of_attempt = (tables.ROUNDS.c.state == RoundState.ABANDONED) & (
        tables.ASSIGNMENTS.c.state == AssignmentState.REPORTED
    )
    query = (
        sqlalchemy.select(sqlalchemy.func.count()).select_from(tables.ASSIGNMENTS.join(tables.ROUNDS)).where(of_attempt)
    )
    with store.database.engine.connect() as connection:
        return connection.scalar(query)


@pytest.mark.long
@pytest.mark.promise("Vectors that a device keeps move by committed rounds that counted its report, once each")
def test_attempts_that_are_abandoned_or_restarted_change_nothing(tmp_path, coordinators, bundles, capsys):
    world, port = World(tmp_path, bundles), free_port()
    with coordinators.local(tmp_path, SEED, port=port, failpoint="round.before-commit:2") as local:
        task = local.create_task(world.bundle, world.settings, world.key).id
        ended = lambda: [one.state for one in local.store.rounds(task) if one.state.ended]  # noqa: E731
        world.train(local, users=range(GOAL), sessions=GOAL)
        wait_until(lambda: ended() == [RoundState.COMMITTED])
        world.train(local, with_one(drop_out=1.0, drop_out_step=1), users=range(GOAL), sessions=GOAL)
        wait_until(lambda: ended() == [RoundState.COMMITTED, RoundState.ABANDONED])
        # The device that failed first gives its old assignment up, which is a session more; others take its place.
        world.train(local, sessions=GOAL + 1)
        wait_until(lambda: not runs(local.pid))
    with coordinators.local(tmp_path, SEED, port=port) as local:
        world.train(local)
        difference, cohorts, _ = world.agreement(local, task)
        in_vain = reported_in_vain(local.store)
    tell(capsys, f"{in_vain} reports in vain", difference)
    assert in_vain == GOAL - 1 + GOAL
    assert set(cohorts[0].values()) == set(world.users.clients[:GOAL])
    assert len(set().union(*(cohort.values() for cohort in cohorts))) == USERS
    assert difference < TOLERANCE


@pytest.mark.long
@pytest.mark.promise("Vectors that a device keeps move by committed rounds that counted its report, once each")
def test_a_secure_fleet_whose_devices_drop_out_of_sums_agrees(tmp_path, coordinators, bundles, capsys):
    secagg = Secagg(clip_norm=8.0, phase_s=4.0)
    world = World(tmp_path, bundles, secagg=secagg, goal=USERS, minimum=GOAL, reporting_deadline_s=40.0)
    with coordinators.local(tmp_path, SEED, secure=True) as local:
        task = local.create_task(world.bundle, world.settings, world.key).id
        world.train(local, with_one(drop_out_secagg=1.0))
        difference, cohorts, models = world.agreement(local, task)
    layout = world.bundle.plan.report
    rounding = [rounding_error(secagg, layout, [1] * len(cohort)) for cohort in cohorts]
    allowed = 2 * sum(rounding) / float(np.linalg.norm(models[-1] - world.model.initial))
    tell(capsys, f"secure sums of {[len(cohort) for cohort in cohorts]} of {USERS}, {allowed:.1e} allowed", difference)
    assert min(map(len, cohorts)) < USERS
    # The error of c is that of a round times |S| / N, and a round's steps are shorter than 1 together.
    assert TOLERANCE < difference < allowed < 1e-2


def test_parameters_that_stay_on_devices_agree_and_nothing_of_them_moves(tmp_path, coordinators, bundles, capsys):
    world = World(tmp_path, bundles, "fedrep", "*.bias")
    with coordinators.local(tmp_path, SEED) as local:
        task = local.create_task(world.bundle, world.settings, world.key).id
        world.train(local)
        difference, _, models = world.agreement(local, task)
    tell(capsys, "FedRep", difference)
    (where,) = world.model.schema.local_ranges
    assert all(np.array_equal(model[where], world.model.initial[where]) for model in models)
    assert not np.array_equal(models[-1], models[0])
    assert difference < TOLERANCE


def test_a_device_that_forgot_would_be_seen(tmp_path, bundles):
    world = World(tmp_path, bundles)
    cohorts = [dict(enumerate(world.users.clients[:GOAL]))] * 3
    right = [after.params for after in replay(world.engine(), world.users, cohorts)]
    forgetful, models = world.engine(), []
    for number, cohort in enumerate(cohorts, start=1):
        members = [world.users.clients.index(client) for client in cohort.values()]
        if number == 3:
            forgetful.begin(members[:1])
        forgetful.run_round(number, members)
        models.append(forgetful.state["params"])
    assert worst_difference(world.engine(), world.users, cohorts, right) == 0
    assert worst_difference(world.engine(), world.users, cohorts, models) > 100 * TOLERANCE


def tell(capsys, what, difference):
    with capsys.disabled():
        print(f"\nkept vectors, {what}: {difference:.1e} relative l2")
