"""Private tasks: noise on every sum, a row of the ledger with every model, and a budget at which they end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from coordinator.commands import CountReport
from coordinator.driver.writing import commit_round
from coordinator.errors import InvalidTask, TaskEnded, UnknownRound
from coordinator.rules.entities import Spent
from coordinator.rules.private_sums import with_least_noise
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered, ClearReports, PrivacyBudget, TaskSettings
from coordinator.store.tasks import Secagg
from fedcore.masking import fixed_points
from fedcore.privacy.accounting import calibrated, inverse_row, spent
from fedcore.privacy.settings import Noise
from secagg.parameters import least_honest
from tests.coordinator.bundles import START, make_private_bundle
from tests.coordinator.conftest import LINEAGE, RELEASE, Desk, states
from tests.coordinator.test_secure import NAMES, SECURE, Device, run

pytestmark = pytest.mark.promise("Every readable noisy sum has one row in the ledger, and tasks keep their budget")

BUDGET = {"epsilon": 4.0, "delta": 1e-6, "users": 1000}


def promise(rounds=3, min_separation_rounds=1, **settings):
    """A budget that lasts for so many rounds, of a task with such a separation."""
    noise = Noise(noise_multiplier=1.0, min_separation_rounds=min_separation_rounds, **settings)
    multiplier = calibrated(noise, rounds, BUDGET["epsilon"], BUDGET["delta"])
    return PrivacyBudget(**BUDGET | settings, noise_multiplier=multiplier)


@pytest.fixture
def private_bundle(tmp_path):
    return make_private_bundle(tmp_path / "private")


def train(desk, rounds=1, names="ab"):
    """Rounds in which all devices report nothing, so that the model moves by the noise alone."""
    for _ in range(rounds):
        for given in desk.assign(*names):
            report(desk, given, np.zeros(desk.store.plan(given.plan.sha256).schema.size))


def report(desk, given, delta):
    """Report a delta, of the weight 1."""
    vector_L = np.array([*delta, 1], np.float32)
    desk.ask(CountReport(given.assignment, "1" * 64, vector_L))


def ledger(store, task):
    with store.database.reading() as records:
        return records.ledger.entries(task), records.ledger.spent(task)


@pytest.mark.every_engine
def test_every_committed_round_has_a_row_and_the_budget_ends_the_task(store, register, desk, private_bundle):
    privacy = promise(rounds=3)
    task = register(private_bundle, rounds=9, privacy=privacy)
    train(desk, 3)
    entries, epsilons = ledger(store, task)
    assert [(one.round, one.clip, one.devices) for one in entries] == [(number, 2.0, 2) for number in (1, 2, 3)]
    assert epsilons[-1] == Spent(3, spent(entries, privacy.delta))
    assert 3.99 < epsilons[-1].epsilon <= 4
    assert store.task(task).state is TaskState.COMPLETED
    assert store.history(task)[-1].cause == "privacy-budget-spent"


def test_a_row_names_the_target_of_its_task_and_those_of_others_name_none(store, register, desk, private_bundle):
    task = register(private_bundle, privacy=promise(), where="region=eu")
    other = register(private_bundle, privacy=promise(rounds=9), population="tablets")
    assert desk.arrive("b").reason == "not-eligible"
    for names, told in (("ab", {"labels": {"region": "eu"}}), ("cd", {"population": "tablets"})):
        for given in [one.result(timeout=0) for one in [desk.wait(name, **told) for name in names]]:
            report(desk, given, np.zeros(desk.store.plan(given.plan.sha256).schema.size))
    ((entry,), _), ((bare,), _) = ledger(store, task), ledger(store, other)
    assert (entry.target, bare.target) == ("region = eu", UNSET)
    assert "target" not in msgspec.json.encode(bare).decode()


@pytest.mark.every_engine
@pytest.mark.parametrize("mechanism", ["gaussian", "tree"])
def test_commit_that_failed_is_tried_again_with_the_same_noise(
    store, register, desk, private_bundle, monkeypatch, mechanism
):
    task = register(private_bundle, rounds=9, privacy=promise(mechanism=mechanism))
    with monkeypatch.context() as patch:
        patch.setattr(commit_round, "reach", fail)
        train(desk)
        assert ledger(store, task) == ((), [])
        left = {one.name for one in store.blobs.stored()}
    desk.pass_time(2)
    assert [one.round for one in ledger(store, task)[0]] == [1]
    assert states(store, task) == [(1, 1, "committed", "")]
    with store.database.reading() as records:
        made = records.snapshot(store.task(task))
    assert {one.name for one in store.blobs.stored()} - left == {made.state_sha256, made.checkpoint_sha256}


def fail(_):
    raise OSError(28, "No space left on device")


@pytest.mark.security("A trained model may remember examples, unless its task was created with --privacy")
def test_noise_on_the_model_has_the_deviation_that_was_promised(store, register, desk, tmp_path):
    privacy, size = promise(rounds=5), 2000
    task = register(make_private_bundle(tmp_path / "large", size), rounds=5, goal=4, privacy=privacy)
    train(desk, 5, "abcd")
    models = [store.checkpoint(task, number)["params"].astype(np.float64) for number in range(6)]
    noise = np.diff(models, axis=0) * 4 / (privacy.noise_multiplier * 2.0)
    chi_square, freedom = float((noise**2).sum()), noise.size
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5
    assert abs(np.corrcoef(noise)[0, 1:]).max() < 6 / size**0.5


def test_sum_is_divided_by_the_goal_when_fewer_devices_report(store, register, desk, private_bundle):
    privacy = PrivacyBudget(epsilon=1e9, delta=1e-6, users=1000, noise_multiplier=1e-4)
    task = register(private_bundle, goal=4, minimum=1, privacy=privacy, rounds=1)
    first, *_ = desk.assign("a", "b", "c", "d")
    report(desk, first, [2, 0, 0, 0])
    desk.pass_time(600)
    np.testing.assert_allclose(store.checkpoint(task)["params"], START + np.array([0.5, 0, 0, 0]), atol=1e-3)


def test_state_that_is_not_finite_ends_the_task_and_its_sum_is_spent(store, register, desk, tmp_path):
    task = register(make_private_bundle(tmp_path / "b", 50, server_lr=3e38), rounds=9, privacy=promise())
    train(desk)
    assert store.task(task).state is TaskState.CANCELLED
    assert [one.round for one in ledger(store, task)[0]] == [1]
    assert states(store, task) == [(1, 1, "abandoned", "non-finite-state")]


def test_bound_that_fell_to_nothing_pauses_its_task_alone(store, register, desk, tmp_path):
    bundle = make_private_bundle(tmp_path / "b", 4, clip_quantile=0.5, clip_lr=1e4)
    task = register(bundle, rounds=9, goal=1, privacy=PrivacyBudget(**BUDGET, noise_multiplier=9.0))
    other = register(rounds=9, goal=1, population="others")
    for _ in range(9):
        if store.task(task).state is TaskState.ACTIVE:
            (given,) = desk.assign("a")
            report(desk, given, [0, 0, 0, 0, store.checkpoint(task)["clip"][0] * 100])
        desk.report(*[desk.wait("b", population="others").result(timeout=0)])
        desk.turn()
    found = store.task(task)
    assert (found.state, found.reason[:8]) == (TaskState.PAUSED, "round 2:")
    assert states(store, task) == [(1, 1, "committed", ""), (2, 1, "abandoned", "update-failed")]
    assert store.task(other).state is TaskState.COMPLETED


def test_update_that_fails_on_a_noisy_sum_ends_the_task_and_is_spent(
    store, register, desk, private_bundle, monkeypatch
):
    task = register(private_bundle, rounds=9, privacy=promise())
    monkeypatch.setattr(commit_round, "aggregate", lambda *_: 1 // 0)
    train(desk)
    assert store.task(task).state is TaskState.CANCELLED
    assert [one.round for one in ledger(store, task)[0]] == [1]
    assert states(store, task) == [(1, 1, "abandoned", "update-failed")]


def test_rollback_leaves_the_ledger_and_spends_nothing(store, register, desk, private_bundle):
    task = register(private_bundle, rounds=3, privacy=promise(rounds=4))
    train(desk, 2)
    before = ledger(store, task)
    store.pause(task)
    store.roll_back(task, 0)
    assert ledger(store, task) == before
    store.resume(task)
    desk.pass_time(1)
    train(desk, 2)
    assert [one.round for one in ledger(store, task)[0]] == [1, 2, 4, 5]
    assert store.task(task).state is TaskState.COMPLETED
    with pytest.raises(UnknownRound):
        store.checkpoint(task, 6)


def test_rollback_is_refused_where_rounds_apart_are_counted_on(store, register, private_bundle):
    privacy = promise(min_separation_rounds=2)
    task = register(private_bundle, min_separation_rounds=2, privacy=privacy)
    store.pause(task)
    with pytest.raises(TaskEnded, match="counts on 2 rounds"):
        store.roll_back(task, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"buffered": Buffered(), "goal": 2}, "mode must be synchronous with privacy"),
        ({"clear": ClearReports(estimator="median")}, "estimator must be mean with privacy"),
        ({"privacy": {"mechanism": "banded", "bands": 2}}, r"bands must be from 2 to min_separation_rounds \(1\)"),
        ({"privacy": {"delta": 1e-3}}, "delta must be below 1 / users"),
        ({"privacy": {"noise_multiplier": None}, "rounds": 100_001}, "rounds must be at most 100000 where the noise"),
        ({"privacy": {"noise_multiplier": None, "epsilon": 1e7}}, r"epsilon must be at most 1e\+06 where the noise"),
        ({"privacy": {"noise_multiplier": 0.1}}, "the first round alone spends"),
        ({"privacy": {"mechanism": "tree"}, "adaptive": True}, "noise must have one size in all rounds"),
        ({"privacy": {"mechanism": "tree"}, "rounds": 1024}, "rounds must be below 1024 with the mechanism tree"),
    ],
)
def test_promise_that_cannot_be_kept_is_refused_with_the_reason(register, tmp_path, settings, words):
    budget = {"noise_multiplier": 2.0} | BUDGET | settings.pop("privacy", {})
    adaptive = {"clip_quantile": 0.5} if settings.pop("adaptive", False) else {}
    bundle = make_private_bundle(tmp_path / "bundle", **adaptive)
    with pytest.raises(InvalidTask, match=words):
        register(bundle, privacy=PrivacyBudget(**budget), **settings)


def test_reports_that_are_not_clipped_as_a_whole_are_refused(register, bundle):
    with pytest.raises(InvalidTask, match="clipped as a whole, and those of fedavg are not"):
        register(bundle, privacy=promise())


@pytest.mark.every_engine
@pytest.mark.parametrize("mechanism", [{"mechanism": "tree"}, {"mechanism": "banded", "bands": 3}])
def test_later_rounds_take_noise_back_even_after_a_restart(store, register, new_desk, tmp_path, mechanism):
    size, rounds = 1000, 4
    separation = {"min_separation_rounds": 3} if "bands" in mechanism else {}
    privacy = promise(rounds=rounds, **mechanism, **separation)
    task = register(make_private_bundle(tmp_path / "b", size), rounds=rounds, goal=1, privacy=privacy, **separation)
    for number in range(rounds):
        train(new_desk(), 1, "abcd"[number])
    models = [store.checkpoint(task, number)["params"].astype(np.float64) for number in range(rounds + 1)]
    noise_TM = np.diff(models, axis=0) / (privacy.noise_multiplier * 2.0)
    rows = [inverse_row(privacy.mechanism, privacy.bands, step) for step in range(1, rounds + 1)]
    inverse_TT = [[row.get(step, 0.0) for step in range(1, rounds + 1)] for row in rows]
    new_TM = np.linalg.solve(inverse_TT, noise_TM)
    np.testing.assert_allclose(np.cov(new_TM), np.eye(rounds), atol=6 * (2 / size) ** 0.5)


@pytest.mark.every_engine
def test_task_whose_noise_needs_another_key_waits_until_it_is_back(store, register, new_desk, private_bundle):
    task = register(private_bundle, rounds=9, privacy=promise(mechanism="tree"))
    train(new_desk())
    Desk(store, lineage=RELEASE)
    assert store.task(task).state is TaskState.PAUSED
    assert f"noise of earlier rounds was made with {LINEAGE.signer}" in store.task(task).reason
    train(new_desk())
    assert [(one.after, one.cause) for one in store.history(task)[1:]] == [
        ("paused", "privacy-unusable"),
        ("active", "lineage-key-back"),
    ]
    assert len(ledger(store, task)[0]) == 2


@pytest.mark.security("min_sum less those that may be corrupt")
@pytest.mark.every_engine
def test_devices_of_secure_rounds_add_the_noise_that_the_row_counts_on(store, register, desk, tmp_path):
    size, bundle = 1000, make_private_bundle(tmp_path / "secure", 1000)
    privacy = promise(rounds=2, mechanism="distributed")
    secagg = Secagg(clip_norm=2.0, bits=14, phase_s=5.0)
    task = register(bundle, **SECURE | {"rounds": 9, "secagg": secagg, "privacy": privacy})
    run([Device(desk, given, np.zeros(size), plan=bundle.plan) for given in desk.assign(*NAMES)])
    ((entry,), _) = ledger(store, task)
    assert (entry.round, entry.devices, entry.honest, entry.clip) == (1, 8, least_honest(8, 8), 2.0)
    before, after = (store.checkpoint(task, number)["params"].astype(np.float64) for number in (0, 1))
    # Eight devices add as much as the honest ones must, each with the same share.
    step = fixed_points(bundle.plan.report, store.task(task).settings.sum_bounds)[0].step
    deviation = privacy.noise_multiplier * entry.square**0.5 * step * (8 / entry.honest) ** 0.5
    chi_square = float((((after - before) * 8 / deviation) ** 2).sum())
    assert abs(chi_square - size) < 6 * (2 * size) ** 0.5


def test_coarse_steps_of_device_noise_count_in_the_first_round(register, tmp_path):
    bundle, secagg = make_private_bundle(tmp_path / "secure", 8), Secagg(clip_norm=2.0, bits=6, phase_s=5.0)
    secure = SECURE | {"secagg": secagg, "rounds": 1}
    with pytest.raises(InvalidTask, match=r"the first round alone spends ε 4\S* at δ 1e-06, and the budget is 4"):
        register(bundle, **secure | {"privacy": promise(rounds=1, mechanism="distributed")})
    register(bundle, **secure | {"privacy": promise(rounds=2, mechanism="distributed")})


def test_noise_for_a_budget_counts_the_steps_of_masked_values():
    settings = TaskSettings(
        population="phones", **SECURE, privacy=PrivacyBudget(**BUDGET, mechanism="distributed")
    )  # fmt: skip
    coarse, fine = (with_least_noise(replace(settings, secagg=Secagg(bits=bits))) for bits in (2, 20))
    assert coarse.privacy.noise_multiplier > fine.privacy.noise_multiplier


def test_a_budget_without_noise_lasts_for_all_rounds_and_no_more(store, register, desk, private_bundle):
    task = register(private_bundle, rounds=3, privacy=PrivacyBudget(**BUDGET))
    assert store.task(task).settings.privacy == promise(rounds=3)
    train(desk, 3)
    entries, epsilons = ledger(store, task)
    assert (len(entries), store.task(task).state) == (3, TaskState.COMPLETED)
    assert 3.99 < epsilons[-1].epsilon <= 4 < spent([*entries, entries[-1]], BUDGET["delta"])


def test_secure_rounds_and_noise_of_devices_need_each_other(register, private_bundle):
    with pytest.raises(InvalidTask, match="mechanism must be other than distributed without secagg"):
        register(private_bundle, privacy=promise(mechanism="distributed"))
    for central in ({"mechanism": "gaussian"}, {"mechanism": "tree"}, {"mechanism": "banded", "bands": 2}):
        separation = {"min_separation_rounds": central.get("bands", 1)}
        privacy = promise(**central, **separation)
        with pytest.raises(InvalidTask, match="mechanism must be distributed with secagg"):
            register(private_bundle, **SECURE | {"secagg": Secagg(clip_norm=2.0), "privacy": privacy} | separation)
