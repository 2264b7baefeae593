"""The policy file and the rules, without a network."""

import time
from dataclasses import replace

import pytest

from device_runtime.conditions import Clock
from device_runtime.errors import ConfigError, PlanRefused, PolicyForbids
from device_runtime.permission.guard import Guard
from device_runtime.permission.policy import PerDay, PlanLimits, Policy, policy_in
from device_runtime.session import run_session
from device_runtime.state.database import open_database
from device_runtime.state.records import DAY_S, Spending, Spent
from device_runtime.trainer import Limits
from fedcore.params import VectorSpec
from fedcore.plan import MOST_PLAN_BYTES, BlobRef
from fedcore.schedule import Loop
from fedcore.signing import SigningKey
from fedcore.wire.messages import Assignment
from tests.device_runtime import linear

SIGNER = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
WHOLE = f"""
populations = ["phones"]
collections = ["typed", "spoken"]
labels = ["app_version"]
signers = ["{SIGNER}"]
min_cohort = 20
require_secure_aggregation = true
[per_day]
compute_seconds = 600
bytes = 50_000_000
sessions = 8
[plan]
parameters = 2_000_000
graph_bytes = 10_000_000
batch_examples = 100_000
"""
PLAN, CHECKPOINT = BlobRef("0" * 64, 100), BlobRef("1" * 64, 1000)
GRAPH_BYTES = sum(ref.size for ref in linear.plan().graphs["onnx"].values())


class Remembered:
    """A tally that was told what to say."""

    def __init__(self, *spent):
        self.answer = Spent(*spent)

    def spent(self):
        return self.answer


class NoReleases:
    """No secure round is released; what releases must be: test_releases.py."""

    def check(self, given, *, again=False):
        raise PlanRefused("against signers of this device's policy", "not released")


def guard(policy=None, spent=(), **clocks):
    return Guard(policy or Policy(), Remembered(*spent), NoReleases(), **clocks)


def assignment(**fields):
    given = {"assignment": "a", "task": "t", "round": 1, "attempt": 1, "slot": 0, "seed": 0, "report_within_s": 60.0}
    return Assignment(**given, plan=PLAN, checkpoint=CHECKPOINT, **fields)


def check_plan(policy, plan=None, examples=10, to_move=0, asked=None, **kwargs):
    def count(collection):
        if asked is not None:
            asked.append(collection)
        return examples

    guarded = guard(policy, **kwargs)
    received_bytes = PLAN.size + CHECKPOINT.size
    plan = plan or linear.plan()
    guarded.check_plan(plan, "onnx", count, received_bytes=received_bytes, to_move=to_move)
    return guarded


def against(rule):
    return pytest.raises(PlanRefused, match=f"^against {rule} of this device's policy: ")


def test_a_whole_policy_is_read(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(WHOLE)
    assert Policy.load(path) == Policy(
        populations=("phones",),
        collections=("typed", "spoken"),
        labels=("app_version",),
        signers=(SIGNER,),
        min_cohort=20,
        require_secure_aggregation=True,
        per_day=PerDay(compute_seconds=600, bytes=50_000_000, sessions=8),
        plan=PlanLimits(parameters=2_000_000, graph_bytes=10_000_000, batch_examples=100_000),
    )


def test_the_state_folders_policy_counts_where_there_is_one(tmp_path):
    assert policy_in(tmp_path) == Policy()
    (tmp_path / "policy.toml").write_text("min_cohort = 3")
    assert policy_in(tmp_path) == Policy(min_cohort=3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "min_cohrt = 20",
            "there is no 'min_cohrt'; did you mean min_cohort\\? there are populations",
        ),
        (
            "[per_day]\nsession = 1",
            r"per_day: there is no 'session'; did you mean sessions\? there are compute_seconds, bytes, ses",
        ),
        ("min_cohort = 0", "min_cohort must be a whole number, at least 1, not 0"),
        ("min_cohort = true", "min_cohort must be a whole number, at least 1, not True"),
        ('min_cohort = "20"', "min_cohort must be a whole number, at least 1, not '20'"),
        ('populations = "phones"', "populations must be a list of one name or more, not 'phones'"),
        ("populations = []", r"populations must be a list of one name or more, not \[\]"),
        ("collections = []", r"collections must be a list of one name or more, not \[\]"),
        ('labels = ["Region"]', r"labels = \('Region',\): label 'Region': a name has 1 to 32 of a-z, 0-9 and _"),
        ("collections = [1]", r"collections must be a list of one name or more, not \[1\]"),
        ("require_secure_aggregation = 1", "require_secure_aggregation must be true or false, not 1"),
        ("[per_day]\nbytes = -1", "per_day: bytes must be a whole number, at least 0, not -1"),
        ("[per_day]\ncompute_seconds = nan", "per_day: compute_seconds must be a number, at least 0, not nan"),
        ("[plan]\nparameters = 1.5", r"plan: parameters must be a whole number, at least 0, not 1\.5"),
        ("plan = 5", r"plan must be PlanLimits\(…\), or a mapping with some of parameters, graph_bytes"),
        ('signers = ["ed25519:x"]', r"signers = \('ed25519:x',\): 'ed25519:x' is not a public key"),
        ('authority_url = "a.example"', "authority_url 'a.example' must start with https://"),
        ("min_cohort = ", "cannot be read"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_key_and_value(tmp_path, text, words):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"policy .*policy\.toml.*{words}"):
        Policy.load(path)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file or directory$"):
        Policy.load(tmp_path / "nowhere.toml")
    (tmp_path / "policy.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        policy_in(tmp_path)


def test_a_policy_made_in_python_is_checked_as_well():
    with pytest.raises(ConfigError, match="populations must be a list of one name or more, not 'phones'"):
        Policy(populations="phones")
    with pytest.raises(ConfigError, match="sessions must be a whole number, at least 0, not -1"):
        PerDay(sessions=-1)


@pytest.mark.security("A policy that names no signers accepts unsigned plans, and no secure round")
def test_the_default_allows_everything():
    guarded = check_plan(Policy(), spent=(1e9, 10**15, 10**6), to_move=10**15)
    guarded.check_in("anything", "onnx")
    guarded.check_assignment(assignment(), moved=10**15)
    assert guarded.visible({"any": 3}) == {"any": 3}
    assert guarded.may_go_on()


def test_only_named_populations_are_served():
    guarded = guard(Policy(populations=("phones", "tablets")))
    guarded.check_in("tablets", "onnx")
    with pytest.raises(PolicyForbids, match=r"^against populations of this device's policy: .* 'toasters'"):
        guarded.check_in("toasters", "onnx")


@pytest.mark.parametrize(
    ("limit", "spent", "rule"),
    [
        ({"compute_seconds": 60.5}, (60.5, 0, 0), "compute_seconds"),
        ({"bytes": 1000}, (0, 1001, 0), "bytes"),
        ({"sessions": 3}, (0, 0, 3), "sessions"),
        ({"sessions": 0}, (), "sessions"),
    ],
)
def test_a_days_budget_that_is_used_up_keeps_the_device_away(limit, spent, rule):
    policy = Policy(per_day=PerDay(**limit))
    with pytest.raises(PolicyForbids, match=rf"^against per_day\.{rule} of this device's policy: .* used up"):
        guard(policy, spent).check_in("phones", "onnx")
    if any(spent):
        guard(policy, [max(0, used - 1.5) for used in spent]).check_in("phones", "onnx")


@pytest.mark.parametrize(("minimum", "fine"), [(20, True), (21, True), (19, False), (0, False), (None, False)])
def test_round_whose_minimum_is_too_low_or_missing_is_refused(minimum, fine):
    guarded = guard(Policy(min_cohort=20))
    if fine:
        guarded.check_assignment(assignment(minimum=minimum), 0)
    else:
        with against("min_cohort"):
            guarded.check_assignment(assignment(minimum=minimum), 0)


@pytest.mark.security("A device whose policy says require_secure_aggregation takes no part in such a task")
def test_a_device_that_wants_secure_aggregation_takes_no_assignment():
    with against("require_secure_aggregation"):
        guard(Policy(require_secure_aggregation=True)).check_assignment(assignment(minimum=1000), 0)


@pytest.mark.security("Its policy names the signers … and bounds what it spends")
def test_only_a_good_signature_of_a_named_signer_is_accepted(tmp_path):
    ours, other = (SigningKey.new(tmp_path / name) for name in ("ours.pem", "other.pem"))
    guarded = guard(Policy(signers=(SIGNER, ours.signer)))
    guarded.check_assignment(assignment(plan_signature=ours.sign(PLAN)), 0)
    for signature, words in (
        (None, "the plan is not signed"),
        (other.sign(PLAN), "which the policy does not name"),
        (ours.sign(CHECKPOINT), "it was altered"),
    ):
        with pytest.raises(PlanRefused, match=words) as refused:
            guarded.check_assignment(assignment(plan_signature=signature), 0)
        assert refused.value.detail == "against signers of this device's policy"


def test_bytes_that_would_exceed_the_day_are_not_fetched():
    policy = Policy(per_day=PerDay(bytes=5000))
    guard(policy, (0, 3000, 0)).check_assignment(assignment(), moved=900)
    with against("per_day.bytes"):
        guard(policy, (0, 3000, 0)).check_assignment(assignment(), moved=901)
    check_plan(policy, spent=(0, 3000, 0), to_move=2000)
    with against("per_day.bytes"):
        check_plan(policy, spent=(0, 3000, 0), to_move=2001)


@pytest.mark.parametrize(
    ("limit", "value"),
    # The linear plan has vectors of 3, and visits 10 examples in batches of 4: twice 3, then 3.
    [("parameters", 3), ("graph_bytes", GRAPH_BYTES), ("batch_examples", 4 * 9)],
)
def test_a_plan_is_held_to_its_limits(limit, value):
    check_plan(Policy(plan=PlanLimits(**{limit: value})))
    with against(f"plan.{limit}"):
        check_plan(Policy(plan=PlanLimits(**{limit: value - 1})))


def test_graphs_beyond_the_memory_are_not_fetched(coordinator, config):
    graphs = linear.graphs() | {"report": bytes(6_000_000)}
    coordinator.offer(linear.plan(graphs), graphs, {"params": linear.PARAMS})
    outcome = run_session(replace(config, policy=Policy(plan=PlanLimits(memory_bytes=1_000_000))))
    assert outcome.detail.startswith("against plan.memory_bytes of this device's policy: ")
    assert outcome.bytes_down < 1_000_000


def test_a_plan_that_the_cache_cannot_keep_is_not_fetched(coordinator, config):
    most = coordinator.plan.size + GRAPH_BYTES + coordinator.checkpoint.size
    outcome = run_session(replace(config, policy=Policy(cache_bytes=most - 1)))
    assert (outcome.outcome, outcome.reason, coordinator.calls.count("blob")) == ("aborted", "plan-refused", 1)
    assert outcome.detail == f"against cache_bytes of this device's policy: {most} found, {most - 1} allowed"
    for enough in (most, 0):
        assert run_session(replace(config, policy=Policy(cache_bytes=enough))).outcome == "reported"


def test_a_plan_too_long_to_be_read_is_not_fetched(coordinator, config):
    coordinator.plan = BlobRef(coordinator.plan.sha256, MOST_PLAN_BYTES + 1)
    outcome = run_session(config)
    assert (outcome.outcome, outcome.reason) == ("aborted", "plan-refused")
    assert "a device reads at most 4,194,304" in outcome.detail
    assert "blob" not in coordinator.calls


def test_a_long_vector_anywhere_in_the_plan_counts(tmp_path):
    plan = linear.plan()
    policy = Policy(plan=PlanLimits(parameters=3))
    longer = VectorSpec("more", 4)
    first, *rest = plan.passes
    for change in (
        {"broadcast": (*plan.broadcast, longer)},
        {"passes": (type(first)(first.name, first.loop, (*first.carry, longer), first.metrics), *rest)},
    ):
        with against("plan.parameters"):
            check_plan(policy, type(plan)(**{name: getattr(plan, name) for name in plan.__struct_fields__} | change))


def test_capped_steps_count_as_they_will_run():
    plan = linear.plan(train=Loop(batch_size=4, epochs=1000, steps=2), sweep=Loop(batch_size=4, steps=1))
    check_plan(Policy(plan=PlanLimits(batch_examples=12)), plan)


def test_a_plan_whose_schema_is_not_its_broadcast_is_refused():
    plan = linear.plan()
    parts = {name: getattr(plan, name) for name in plan.__struct_fields__}
    for broadcast in ((), (VectorSpec("params", 4),)):
        with pytest.raises(PlanRefused, match="schema has 3 parameters, its broadcast"):
            check_plan(Policy(), type(plan)(**parts | {"broadcast": broadcast}))


def test_another_collection_is_refused_and_neither_counted_nor_told_of():
    policy = Policy(collections=("typed",), plan=PlanLimits(batch_examples=100))
    asked = []
    with against("collections"):
        check_plan(policy, asked=asked)
    assert asked == []
    assert guard(policy).visible({"default": 10, "typed": 3}) == {"typed": 3}


def test_work_stops_when_the_days_seconds_are_used_up():
    now = iter([100.0, 103.0, 105.0, 105.25])
    guarded = check_plan(Policy(per_day=PerDay(compute_seconds=10)), spent=(5.0, 0, 0), timer=lambda: next(now))
    assert guarded.may_go_on()
    assert guarded.may_go_on()
    with against("per_day.compute_seconds"):
        guarded.may_go_on()


def test_the_guard_measures_cpu_time():
    guarded, before = check_plan(Policy()), time.process_time()
    while time.process_time() - before < 0.01:
        pass
    assert guarded.seconds >= 0.01


class Time:
    """A clock that only the test moves, and a database of spending by it."""

    def __init__(self, folder):
        self.wall, self.boot_s, self.boot = 1e9, 50.0, "first"
        self.folder = folder

    def do(self, work):
        clock = Clock(lambda: self.wall, lambda: self.boot_s, self.boot)
        with open_database(self.folder, clock) as database:
            return work(Spending(database, clock))

    def add(self, *spent):
        self.do(lambda budget: budget.add(Spent(*spent)))

    def passes(self, seconds):
        self.wall, self.boot_s = self.wall + seconds, self.boot_s + seconds

    @property
    def spent(self):
        return self.do(lambda budget: budget.spent())


def test_day_keeps_the_sum_of_many_sessions_in_few_rows(tmp_path):
    with open_database(tmp_path, Clock()) as database:
        budget = Spending(database, Clock())
        for _ in range(1500):
            budget.add(Spent(1.0, 10, 1))
        assert budget.spent() == Spent(1500.0, 15_000, 1500)
        assert database.execute("SELECT count(*) FROM spent") == [(1,)]


def test_what_was_used_counts_for_a_day_and_at_most_an_hour_longer(tmp_path):
    time = Time(tmp_path)
    for _ in range(30):
        time.add(1.0, 10, 1)
        time.passes(3600)
    assert time.spent in {Spent(24.0, 240, 24), Spent(25.0, 250, 25)}
    time.passes(DAY_S + 1)
    assert time.spent == Spent()


@pytest.mark.parametrize("jump_s", [-1e8, 1e8])
def test_a_clock_that_is_set_neither_renews_the_day_nor_uses_it_up(tmp_path, jump_s):
    time = Time(tmp_path)
    time.add(5.0, 10, 1)
    time.wall += jump_s
    time.add(1.0, 0, 0)
    assert time.spent == Spent(6.0, 10, 1)
    time.wall -= jump_s
    time.passes(DAY_S + 3601)
    assert time.spent == Spent()


def test_day_ends_after_a_reboot_with_a_clock_that_fell_back(tmp_path):
    time = Time(tmp_path)
    time.add(5.0, 10, 1)
    time.boot, time.boot_s, time.wall = "next", 1.0, time.wall - 1e8
    assert time.spent == Spent(5.0, 10, 1)
    time.passes(DAY_S + 3601)
    assert time.spent == Spent()


def test_training_gets_what_plan_and_day_leave():
    policy = Policy(plan=PlanLimits(memory_bytes=5, compute_seconds=7.0), per_day=PerDay(compute_seconds=10.0))
    assert guard(policy).limits() == Limits(5, 7.0)
    assert guard(policy, (8.0, 0, 0)).limits() == Limits(5, 2.0)


@pytest.mark.security("only if its policy names signers, unless it says unsigned_programs")
@pytest.mark.security("a device runs programs only when its policy names signers")
def test_programs_that_nobody_vouches_for_are_not_asked_for():
    with pytest.raises(PolicyForbids, match=r"^against unsigned_programs of this device's policy: "):
        guard().check_in("phones", "executorch")
    guard(Policy(unsigned_programs=True)).check_in("phones", "executorch")
    guard(Policy(signers=(SIGNER,))).check_in("phones", "executorch")
