"""One privacy budget for a population: what its tasks count as, and which task is refused for it."""

from __future__ import annotations

import math
import threading

import httpx2
import msgspec
import pytest
from dp_accounting import GaussianDpEvent, pld

from coordinator.errors import BudgetExceeded, InvalidBudget, UnknownPopulation
from coordinator.rules.budget import PopulationBudget
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import PrivacyBudget, TaskSettings
from coordinator.store import registration
from coordinator.store.tasks import open_coordinator_store
from fedcore.privacy.accounting import Loss, loss_of, loss_of_rounds, spent
from fedcore.privacy.settings import LedgerEntry, Noise
from tests.coordinator.bundles import make_bundle, make_evaluation_bundle, make_plan, make_private_bundle
from tests.coordinator.test_privacy import BUDGET, fail, promise, train

ONE = {"epsilon": 1.0, "delta": 1e-6, "users": 1000}
DELTA = 1e-6


@pytest.fixture
def private(tmp_path):
    return make_private_bundle(tmp_path / "private")


@pytest.fixture
def ask(register, private):
    """Register a private task; answers its id."""
    return lambda **settings: register(private, **{"privacy": PrivacyBudget(**ONE), **settings})


def test_losses_of_alike_rounds_are_those_of_their_rows():
    for noise in (
        Noise(noise_multiplier=2.0),
        Noise(noise_multiplier=2.0, min_separation_rounds=4),
        Noise(noise_multiplier=2.0, mechanism="tree"),
        Noise(noise_multiplier=2.0, mechanism="tree", min_separation_rounds=3),
        Noise(noise_multiplier=2.0, mechanism="banded", bands=3, min_separation_rounds=5),
        Noise(noise_multiplier=2.0, mechanism="distributed", min_separation_rounds=2),
        LedgerEntry(noise_multiplier=2.0, mechanism="distributed", round=1, clip=1.0, devices=9, square=100),
    ):
        for rounds in range(14):
            assert loss_of_rounds(noise, rounds).epsilon(DELTA) == pytest.approx(spent([noise] * rounds, DELTA))


def test_tasks_together_are_less_than_their_sum_and_above_each():
    gaussian, masked = (
        loss_of([Noise(noise_multiplier=4.0, mechanism=one)] * 9) for one in ("gaussian", "distributed")
    )
    tree = loss_of([Noise(noise_multiplier=9.0, mechanism="tree")] * 20)
    for first, second in ((gaussian, gaussian), (gaussian, tree), (gaussian, masked), (masked, masked)):
        alone = [one.epsilon(DELTA) for one in (first, second)]
        assert max(alone) < (first + second).epsilon(DELTA) < sum(alone)
    # Nine rounds twice are eighteen rounds.
    eighteen = spent([Noise(noise_multiplier=4.0)] * 18, DELTA)
    assert (gaussian + gaussian).epsilon(DELTA) == pytest.approx(eighteen, rel=1e-9)
    assert (masked + Loss.unbounded()).epsilon(DELTA) == math.inf


def test_losses_of_gaussian_noise_are_those_of_an_independent_accountant():
    events = [(3.0, 10), (7.0, 40), (1.5, 1)]
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    together = Loss()
    for multiplier, rounds in events:
        accountant.compose(GaussianDpEvent(multiplier), rounds)
        together += loss_of_rounds(Noise(noise_multiplier=multiplier), rounds)
    for delta in (1e-9, 1e-6, 1e-3):
        assert together.epsilon(delta) == pytest.approx(accountant.get_epsilon(delta), rel=2e-3)
    # Noise of devices with fine steps is Gaussian nearly, and bounded by divergences: never less.
    masked = together + loss_of_rounds(Noise(noise_multiplier=3.0, mechanism="distributed"), 10)
    accountant.compose(GaussianDpEvent(3.0), 10)
    assert accountant.get_epsilon(1e-6) < masked.epsilon(1e-6) < 1.15 * accountant.get_epsilon(1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_a_budget_that_is_no_number_above_zero_is_refused(store, value):
    with pytest.raises(InvalidBudget, match="epsilon must be"):
        store.set_budget("phones", value, DELTA)
    with pytest.raises(InvalidBudget, match="delta must be"):
        store.set_budget("phones", 1.0, value)
    with pytest.raises(UnknownPopulation):
        store.budget("phones")


def test_a_population_whose_name_cannot_be_has_no_budget(store):
    for name in ("", "x" * 201, "a\0b"):
        with pytest.raises(InvalidBudget, match="population must be a name"):
            store.set_budget(name, 1.0, DELTA)


@pytest.mark.security("a task that would exceed it is refused before a device hears of it")
@pytest.mark.every_engine
def test_a_task_that_would_exceed_the_budget_is_refused_with_what_is_left(store, ask):
    store.set_budget("phones", 1.3, DELTA)
    first = ask(name="first")
    with pytest.raises(BudgetExceeded) as refused:
        ask(name="second")
    left = store.budget("phones").left
    assert str(refused.value).startswith(
        f"in population 'phones' ε {left:.4g} of 1.3 is left at δ 1e-06, and 'second' needs 0.4"
    )
    assert f"spent by 'first' ({first}) 1: muster privacy budget --population phones" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [one.id for one in store.tasks()] == [first]
    ask(name="third", population="tablets")


@pytest.mark.every_engine
def test_a_task_without_privacy_is_refused_where_there_is_a_budget(store, register):
    store.set_budget("phones", 1e6, DELTA)
    with pytest.raises(BudgetExceeded, match="promises no privacy, which no budget covers"):
        register()
    store.remove_budget("phones")
    register()


@pytest.mark.security("a task that would exceed it is refused before a device hears of it")
@pytest.mark.every_engine
def test_one_of_two_tasks_that_are_created_at_once_is_refused(store, database, tmp_path, private):
    store.set_budget("phones", 1.0, DELTA)
    settings = TaskSettings(population="phones", goal=2, rounds=2, privacy=PrivacyBudget(**ONE))
    begin, outcomes = threading.Barrier(4), []

    def create():
        with open_coordinator_store(database, tmp_path / "blobs") as own:
            begin.wait()
            try:
                outcomes.append(own.register_task(private, settings).id)
            except BudgetExceeded:
                outcomes.append(None)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    assert [one for one in outcomes if one] == [one.id for one in store.tasks()]
    assert len(store.tasks()) == 1


@pytest.mark.every_engine
def test_a_budget_and_a_task_that_come_at_once_do_not_both_pass(store, database, tmp_path, bundle):
    settings = TaskSettings(population="phones", goal=2, rounds=2)
    begin, outcomes = threading.Barrier(2), []

    def attempt(act):
        with open_coordinator_store(database, tmp_path / "blobs") as own:
            begin.wait()
            try:
                act(own)
                outcomes.append(act)
            except (BudgetExceeded, InvalidBudget):
                pass

    acts = (lambda own: own.register_task(bundle, settings), lambda own: own.set_budget("phones", 1.0, DELTA))
    threads = [threading.Thread(target=attempt, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1


@pytest.mark.every_engine
def test_running_tasks_count_with_all_rounds_and_ended_ones_with_theirs(store, ask, desk):
    task = ask(rounds=9, privacy=promise(rounds=3))
    (counted,) = store.budget("phones").tasks
    assert (counted.rounds, counted.released) == (3, 0)
    assert 3.99 < counted.epsilon <= 4
    train(desk)
    (counted,) = store.budget("phones").tasks
    assert (counted.rounds, counted.released) == (3, 1)
    store.pause(task)
    assert store.budget("phones").tasks[0].rounds == 3
    store.cancel(task)
    (counted,) = store.budget("phones").tasks
    assert (counted.rounds, counted.state) == (1, TaskState.CANCELLED)
    assert counted.epsilon == pytest.approx(store.spent(task)[-1].epsilon)


def test_a_task_that_was_cancelled_before_its_first_round_gives_all_back(store, ask, register):
    store.set_budget("phones", 1.0, DELTA)
    store.cancel(ask())
    assert store.budget("phones").epsilon == 0
    ask()
    store.remove_budget("phones")
    store.cancel(register())
    assert store.set_budget("phones", 1.0, DELTA).epsilon == pytest.approx(1.0)


@pytest.mark.every_engine
def test_a_task_whose_writing_fails_reserves_nothing(store, ask, monkeypatch):
    store.set_budget("phones", 1.0, DELTA)
    with monkeypatch.context() as patch:
        patch.setattr(registration, "reach", fail)
        with pytest.raises(OSError, match="No space left"):
            ask()
    assert store.budget("phones").tasks == ()
    ask()


def test_a_task_that_was_cancelled_while_a_round_ran_counts_with_it(store, ask, desk):
    task = ask(rounds=9)
    desk.assign("a", "b")
    store.cancel(task)
    assert store.budget("phones").tasks[0].rounds == 1
    desk.pass_time(2)
    assert store.budget("phones").tasks[0].rounds == 0


@pytest.mark.security("a task that would exceed it is refused before a device hears of it")
def test_a_rollback_that_would_exceed_the_budget_is_refused(store, ask, desk):
    task = ask(rounds=3, privacy=PrivacyBudget(**BUDGET, noise_multiplier=20.0))
    train(desk, 2)
    store.pause(task)
    whole = store.budget("phones").epsilon
    store.set_budget("phones", whole, DELTA)
    with pytest.raises(BudgetExceeded, match="needs"):
        store.roll_back(task, 0)
    assert store.task(task).settings.rounds == 3
    store.set_budget("phones", whole * 2, DELTA)
    store.roll_back(task, 0)
    (counted,) = store.budget("phones").tasks
    assert (counted.released, counted.rounds) == (2, 5)
    store.resume(task)
    train(desk, 3)
    assert store.task(task).state is TaskState.COMPLETED
    assert store.budget("phones").epsilon == pytest.approx(store.spent(task)[-1].epsilon)


@pytest.mark.every_engine
def test_a_budget_below_what_is_spent_is_refused_and_the_old_one_stays(store, ask, register):
    ask(name="first")
    store.set_budget("phones", 2.0, DELTA)
    with pytest.raises(
        InvalidBudget, match=r"at least 1, which the tasks of population 'phones' may have spent.*first"
    ):
        store.set_budget("phones", 0.5, DELTA)
    assert store.budget("phones").budget == PopulationBudget(epsilon=2.0, delta=DELTA)
    register(population="tablets")
    with pytest.raises(InvalidBudget, match="'tablets' has tasks without privacy"):
        store.set_budget("tablets", 1e6, DELTA)


def test_a_budget_of_a_smaller_delta_counts_tasks_at_that_delta(store, ask):
    ask()
    assert store.set_budget("phones", 9.0, 1e-12).epsilon > 1.5
    with pytest.raises(InvalidBudget, match=r"at least 1\.577"):
        store.set_budget("phones", 1.0, 1e-12)


def test_a_task_that_begins_at_a_model_counts_once_beside_its_parent(store, ask, private, desk):
    parent = ask(rounds=9, privacy=PrivacyBudget(**BUDGET, noise_multiplier=9.0))
    train(desk, 2)
    store.cancel(parent)
    before = store.budget("phones").epsilon
    store.set_budget("phones", before + 0.9, DELTA)
    child = ask(starts_from=parent, privacy=PrivacyBudget(**ONE | {"epsilon": 0.9}))
    report = store.budget("phones")
    assert [one.task for one in report.tasks] == [parent, child]
    assert report.tasks[0].adds + report.tasks[1].adds == pytest.approx(report.epsilon)
    assert before < report.epsilon < before + 0.9
    with pytest.raises(BudgetExceeded):
        ask(starts_from=parent, privacy=PrivacyBudget(**ONE))


def test_held_out_devices_have_a_budget_of_their_own(store, ask):
    store.set_budget("phones", 1.0, DELTA)
    ask(hold_out_devices=0.1)
    ask(hold_out_devices=0.1, on_held_out=True)
    assert store.budget("phones").epsilon == pytest.approx(1.0)
    with pytest.raises(BudgetExceeded):  # some of the held-out devices of a larger share trained
        ask(hold_out_devices=0.2, on_held_out=True)
    assert [one.adds for one in store.budget("phones").tasks] == [pytest.approx(1.0), 0.0]


def test_more_rounds_than_an_accountant_could_list_are_counted(store, ask):
    noise = PrivacyBudget(epsilon=1e300, delta=1e-6, users=1000, noise_multiplier=1e-6)
    ask(rounds=2**31 - 1, privacy=noise)
    spent_by_it = store.budget("phones").epsilon
    assert 1e21 < spent_by_it < 2e21


def test_the_report_says_what_each_task_is(store, ask, register, tmp_path, desk):
    ask(name="trains")
    register(make_evaluation_bundle(tmp_path / "evaluation"), name="measures", hold_out_devices=0.1, on_held_out=True)
    plan = msgspec.structs.replace(make_plan(), question="SELECT COUNT(*) FROM examples")
    register(make_bundle(tmp_path / "question", plan), name="asks")
    report = store.budget("phones")
    assert [(one.name, one.kind, one.mechanism) for one in report.tasks] == [
        ("trains", "training", "gaussian"),
        ("measures", "evaluation", ""),
        ("asks", "question", ""),
    ]
    assert (report.epsilon, report.left, report.delta) == (None, None, DELTA)
    assert (report.tasks[1].epsilon, report.tasks[1].adds) == (None, None)


def test_changes_of_a_budget_are_in_the_audit_log(store):
    store.set_budget("phones", 2.0, DELTA, by="somebody")
    store.remove_budget("phones", by="somebody")
    actions = [(one.actor, one.action, one.subject, one.detail) for one in store.audit()]
    assert actions == [
        ("somebody", "budget-set", "phones", "ε 2 at δ 1e-06"),
        ("somebody", "budget-removed", "phones", ""),
    ]


def test_a_budget_may_be_set_before_the_first_task(store):
    for ask in (store.budget, store.remove_budget):
        with pytest.raises(UnknownPopulation, match="there is no population 'phones'"):
            ask("phones")
    report = store.set_budget("phones", 2.0, DELTA)
    assert report == store.budget("phones")
    assert (report.epsilon, report.left, report.tasks) == (0.0, 2.0, ())
    with store.database.reading() as records:
        assert records.populations() == frozenset()  # no device may check in to it yet


def test_the_page_of_a_population_shows_its_budget(store, ask, served):
    ask(name="first <b>")
    page = httpx2.get(f"{served.admin}/populations/phones").text
    assert "No budget is set, so no task is refused; together they reveal ε 1 at δ 1e-06." in page
    store.set_budget("phones", 1.3, DELTA)
    page = httpx2.get(f"{served.admin}/populations/phones").text
    assert "Of ε 1.3 at δ 1e-06, ε 0.3 is left; ε 1 is spent, or reserved for rounds to come." in page
    assert 'first &lt;b&gt;</a></th><td>training</td><td><span class="state active">active</span></td>' in page
    assert '<td class="whole">0 of 2</td><td class="whole">1</td><td class="whole">1</td>' in page
    assert "a device that enrols anew is a new one" in page
