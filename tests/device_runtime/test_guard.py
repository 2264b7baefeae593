"""The guard in the real runtime: against a real coordinator over HTTP, and a small one that says what it hears."""

import contextlib
import itertools
import logging
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from coordinator.store.tables import TASKS
from coordinator.store.tasks import TaskSettings
from device_runtime import Collection, ConfigError, Device, ExampleStore, PerDay, PlanLimits, Policy
from device_runtime.session import run_session
from device_runtime.state import records as journal
from device_runtime.state.records import read_journal
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.params import ParamSchema, TensorSpec
from fedcore.plan import Field
from fedcore.signing import SigningKey
from fedcore.wire.messages import Abort, Accepted, Offer, encode
from tests.device_runtime.coordinator import answer, status

OTHER = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
POPULATIONS = (f"population-{number}" for number in itertools.count())


class World:
    """A real coordinator with its store, a signed and an unsigned bundle, and the signer's key."""

    def __init__(self, url, store, key, signed, unsigned):
        self.url, self.store, self.key, self.signed, self.unsigned = url, store, key, signed, unsigned

    def task(self, bundle=None, plan=None, **settings):
        """A population with one task; `plan` is what a coordinator that cheats hands out instead."""
        population = next(POPULATIONS)
        given = {"goal": 1, "rounds": 100, "over_selection": 1.0, "selection_timeout_s": 0.2} | settings
        with contextlib.ExitStack() as cheating:
            if plan is not None:
                cheating.enter_context(self.handing_out(plan))
            settings = TaskSettings(population=population, **given)
            return self.store.register_task(bundle or self.signed, settings).id, population

    @contextlib.contextmanager
    def handing_out(self, plan):
        """Tasks that are registered meanwhile have this plan, before the coordinator can read them with another."""
        ref = self.store.blobs.put(plan.encode())
        with self.store.database.writing() as records:
            records.add_blob(ref, public=True)
        change = f"UPDATE {TASKS.name} SET plan_sha256 = '{ref.sha256}' WHERE id = NEW.id"
        with self.store.database.engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE TRIGGER cheat AFTER INSERT ON {TASKS.name} BEGIN {change}; END")
        try:
            yield
        finally:
            with self.store.database.engine.begin() as connection:
                connection.exec_driver_sql("DROP TRIGGER cheat")

    def refusals(self, task):
        """Why devices gave up, over all attempts."""
        return [attempt.abort_reasons for attempt in self.store.rounds(task) if attempt.abort_reasons]


@pytest.fixture(scope="module")
def world(tmp_path_factory, coordinators):
    folder = tmp_path_factory.mktemp("world")
    key = SigningKey.new(folder / "key.pem")
    model, algorithm = Model(load("logreg")), create("fedavg", {"batch_size": 5, "epochs": 2})
    signed = export_bundle(model, algorithm, folder / "signed").sign(key)
    unsigned = export_bundle(model, algorithm, folder / "unsigned")
    with coordinators.local(folder) as local:
        yield World(local.url, local.store, key, signed, unsigned)


@pytest.fixture
def device(world, tmp_path):
    """A device with twelve examples: a function of its population and its policy."""
    fields = (Field("x", "float32", (1, 8, 8)), Field("y", "int64", high=10))
    examples = ({"x": np.full((1, 8, 8), 0.5, np.float32), "y": n % 10} for n in range(12))
    ExampleStore.open(tmp_path / "examples").extend(Collection("default", fields), examples)

    def make(population, policy=None):
        return Device(world.url, population, tmp_path / "examples", tmp_path / "state", policy=policy, wait_s=5.0)

    return make


def refused(world, task, outcome, rule, words=""):
    """The device gave its assignment up because of `rule`, and the coordinator counted that."""
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("aborted", "plan-refused", "permanent")
    assert outcome.detail.startswith(f"against {rule} of this device's policy: ")
    assert words in outcome.detail
    assert outcome.steps == 0
    assert world.refusals(task) == [{"plan-refused": 1}]


def kept_away(outcome, rule):
    """The device did not call the coordinator because of `rule`."""
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("not-now", "policy", "permanent")
    assert outcome.detail.startswith(f"against {rule} of this device's policy: ")
    assert (outcome.bytes_up, outcome.bytes_down) == (0, 0)


@pytest.mark.security("Rounds in the clear need a plan signature where the policy names signers")
def test_a_plan_of_a_named_signer_within_all_limits_is_trained(world, device):
    _, population = world.task(goal=1)
    policy = Policy(
        populations=(population,),
        collections=("default",),
        signers=(OTHER, world.key.signer),
        per_day=PerDay(compute_seconds=60, bytes=10**6, sessions=5),
        plan=PlanLimits(parameters=650, graph_bytes=10**6, batch_examples=5 * 2 * 3),
    )
    outcome = device(population, policy).run_once()
    assert (outcome.outcome, outcome.examples, outcome.steps) == ("reported", 12, 6), outcome


@pytest.mark.security("A plan that was altered … is refused, also when its digests were made to fit")
def test_a_tampered_plan_is_refused_although_every_digest_fits(world, device):
    evil = msgspec.structs.replace(world.signed.plan, name="evil")
    task, population = world.task(plan=evil)
    outcome = device(population, Policy(signers=(world.key.signer,))).run_once()
    refused(world, task, outcome, "signers", "does not have the signature of ed25519:")
    assert device(population).run_once().outcome == "reported"


@pytest.mark.security("Rounds in the clear need a plan signature where the policy names signers")
def test_an_unsigned_plan_and_one_of_another_signer_are_refused(world, device):
    task, population = world.task(world.unsigned)
    refused(world, task, device(population, Policy(signers=(OTHER,))).run_once(), "signers", "not signed")
    task, population = world.task(world.signed)
    refused(world, task, device(population, Policy(signers=(OTHER,))).run_once(), "signers", "does not name")


def test_a_plan_whose_schema_is_not_its_model_is_refused(world, device):
    wrong = msgspec.structs.replace(world.signed.plan, schema=ParamSchema((TensorSpec("w", (3,)),)))
    task, population = world.task(plan=wrong)
    outcome = device(population, Policy(plan=PlanLimits(parameters=5))).run_once()
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")
    assert "schema has 3 parameters, its broadcast 650" in outcome.detail
    assert world.refusals(task) == [{"plan-refused": 1}]


@pytest.mark.security("Its policy names the signers … and bounds what it spends")
@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Policy(min_cohort=2), "min_cohort"),
        (Policy(require_secure_aggregation=True), "require_secure_aggregation"),
        (Policy(plan=PlanLimits(parameters=649)), "plan.parameters"),
        (Policy(plan=PlanLimits(graph_bytes=100)), "plan.graph_bytes"),
        (Policy(cache_bytes=100), "cache_bytes"),
        (Policy(plan=PlanLimits(batch_examples=29)), "plan.batch_examples"),
        (Policy(per_day=PerDay(bytes=3000)), "per_day.bytes"),
        (Policy(per_day=PerDay(compute_seconds=1e-9)), "per_day.compute_seconds"),
    ],
)
def test_what_is_against_the_policy_is_given_up_by_the_rules_name(world, device, policy, rule):
    task, population = world.task()
    refused(world, task, device(population, policy).run_once(), rule)


def test_round_is_judged_by_its_minimum_of_reports_not_its_goal(world, device):
    task, population = world.task(goal=3, minimum=1)
    refused(world, task, device(population, Policy(min_cohort=2)).run_once(), "min_cohort", "count with 1 reports")
    assert device(population, Policy(min_cohort=1)).run_once().outcome == "reported"


@pytest.mark.security("Its policy names the signers … and bounds what it spends")
def test_forbidden_collection_is_neither_trained_on_nor_mentioned(world, device):
    task, population = world.task()
    outcome = device(population, Policy(collections=("typed",))).run_once()
    assert (outcome.outcome, outcome.reason) == ("rejected", "not-eligible")
    assert world.store.rounds(task) == []


@pytest.mark.security("Its policy names the signers … and bounds what it spends")
def test_another_population_is_not_called(world, device):
    _, population = world.task()
    kept_away(device(population, Policy(populations=("others",))).run_once(), "populations")


@pytest.mark.security("Its policy names the signers … and bounds what it spends")
@pytest.mark.parametrize("limit", [{"sessions": 1}, {"bytes": 20_000}, {"compute_seconds": 1e-3}])
def test_daily_budget_outlasts_the_process_and_keeps_the_device_away(world, device, limit):
    _, population = world.task()
    (rule,) = limit
    policy, outcomes = Policy(per_day=PerDay(**limit)), []
    while len(outcomes) < 20 and (not outcomes or outcomes[-1].outcome == "reported"):
        outcomes.append(device(population, policy).run_once())
    assert f"against per_day.{rule} of this device's policy" in outcomes[-1].detail
    if limit == {"sessions": 1}:
        assert [outcome.outcome for outcome in outcomes] == ["reported", "not-now"]
        kept_away(outcomes[-1], "per_day.sessions")
    assert device(population).run_once().outcome == "reported"


def test_the_coordinator_hears_nothing_of_the_policy(coordinator, config):
    policy = Policy(signers=(OTHER,), min_cohort=1)
    outcome = Device(config.coordinator, "phones", config.examples, config.state, policy=policy).run_once()
    assert coordinator.aborts == [Abort("plan-refused")]
    assert outcome.detail == "against signers of this device's policy: the plan is not signed"
    assert coordinator.calls == ["check-in", "assignment", "abort"]


def test_the_check_in_mentions_allowed_collections_alone(coordinator, config):
    device = Device(config.coordinator, "phones", config.examples, config.state, policy=Policy(collections=("typed",)))
    assert "against collections" in device.run_once().detail
    assert coordinator.checkins[0].examples == {}


@pytest.mark.security("Its policy names the signers … and bounds what it spends")
@pytest.mark.security("Of collections that the device's policy does not name it learns nothing")
def test_offers_tell_nothing_of_a_collection_that_is_not_shown(coordinator, config):
    rules = ({"min_examples": 11}, {"min_examples": 10}, {"min_recent_examples": 1}, {})
    offers = tuple(Offer(task=f"t-{place}", collection="default", **rule) for place, rule in enumerate(rules))
    coordinator.faults["check-in"] = [answer(encode(Accepted("s-1", offers)))] * 2
    device = Device(config.coordinator, "phones", config.examples, config.state, policy=Policy(collections=("typed",)))
    assert "against collections" in device.run_once().detail
    (config.state / "elsewhere").mkdir()
    assert run_session(replace(config, state=config.state / "elsewhere")).outcome == "reported"
    assert [willing.tasks for willing in coordinator.willing] == [("t-3",), ("t-1", "t-2", "t-3")]


def test_the_plan_is_checked_before_graphs_and_checkpoint_are_fetched(coordinator, config):
    policy = Policy(plan=PlanLimits(parameters=2))
    Device(config.coordinator, "phones", config.examples, config.state, policy=policy).run_once()
    assert coordinator.calls == ["check-in", "assignment", "blob", "abort"]


def test_policy_of_the_state_folder_holds_and_a_bad_one_is_an_error(coordinator, config):
    config.state.mkdir()
    path = config.state / "policy.toml"
    path.write_text('populations = ["tablets"]')
    assert (
        "against populations" in Device(config.coordinator, "phones", config.examples, config.state).run_once().detail
    )
    other = config.state.parent / "other.toml"
    other.write_text("")
    allowed = Device(config.coordinator, "phones", config.examples, config.state, policy=other)
    assert allowed.run_once().outcome == "reported"
    path.write_text("populations = 3")
    with pytest.raises(ConfigError, match="populations must be a list of one name or more, not 3"):
        Device(config.coordinator, "phones", config.examples, config.state)
    assert coordinator.calls.count("check-in") == 1


def test_a_device_that_accepts_every_plan_says_so_once(coordinator, config, caplog):
    device = Device(config.coordinator, "phones", config.examples, config.state)
    with caplog.at_level(logging.INFO):
        assert [device.run_once().outcome for _ in range(2)] == ["reported"] * 2
    said = [record.getMessage() for record in caplog.records if "signer" in record.getMessage()]
    assert len(said) == 1
    caplog.clear()
    Device(config.coordinator, "phones", config.examples, config.state, policy=Policy(signers=(OTHER,))).run_once()
    assert not [record for record in caplog.records if "signer" in record.getMessage()]


def test_a_host_app_stops_its_device(coordinator, config):
    device = Device(config.coordinator, "phones", config.examples, config.state)
    stop, outcomes = threading.Event(), []

    def on_outcome(outcome):
        outcomes.append(outcome.outcome)
        if len(outcomes) == 2:
            stop.set()

    device.run_forever(stop, on_outcome)
    assert outcomes == ["reported", "reported"]
    device.run_forever(stop, on_outcome)
    assert len(outcomes) == 2


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Policy(populations=("others",)), "populations"),
        (Policy(require_secure_aggregation=True), "require_secure_aggregation"),
        (Policy(min_cohort=2), "min_cohort"),
        (Policy(signers=(OTHER,)), "signers"),
        (Policy(collections=("typed",)), "collections"),
        (Policy(per_day=PerDay(bytes=1)), "per_day.bytes"),
    ],
)
def test_a_finished_report_is_not_sent_under_a_policy_that_forbids_it_now(coordinator, config, policy, rule):
    coordinator.faults["report"] = [status(500)]
    first = Device(config.coordinator, "phones", config.examples, config.state).run_once()
    assert "the next session sends it" in first.notices[0]
    outcome = Device(config.coordinator, "phones", config.examples, config.state, policy=policy).run_once()
    assert f"against {rule} of this device's policy" in outcome.notices[0]
    assert coordinator.calls.count("report") == 1
    assert "dropped" in [entry.outcome for entry in read_journal(config.state)]
    assert list(config.state.glob("*.report")) == []


def test_a_days_budget_does_not_depend_on_what_the_journal_still_holds(coordinator, config, monkeypatch):
    monkeypatch.setattr(journal, "MOST_WITH_WORK", 1)
    policy = Policy(per_day=PerDay(sessions=3))
    outcomes = [
        Device(config.coordinator, "phones", config.examples, config.state, policy=policy).run_once() for _ in range(4)
    ]
    assert [outcome.outcome for outcome in outcomes] == ["reported"] * 3 + ["not-now"]
    assert len(read_journal(config.state)) <= 2
