"""Privacy on the command line: budgets, epsilon, and private runs, the same at each door."""

import json
import math
import os
from bisect import bisect_right
from dataclasses import replace
from itertools import product

import dp_accounting
import pytest

import muster
from coordinator.errors import BudgetExceeded, InvalidBudget
from coordinator.rules.budget import PopulationBudget
from coordinator.rules.private_sums import entry_of, entry_of_devices
from coordinator.rules.task_settings import PrivacyBudget, TaskSettings
from fedcore.privacy.accounting import spent
from tests.coordinator.bundles import make_bundle, make_private_bundle
from tests.muster.doors import DOORS, Doors, opened
from tests.muster.test_cli import in_process
from tests.muster.test_remote import (
    failure,
    served as served,  # noqa: PLC0414 - a fixture
)

ROUNDS = 60
BUDGET = {"epsilon": 8.0, "delta": 1e-6, "users": 1000}
SETTINGS = {"population": "phones", "goal": 10, "rounds": ROUNDS, "min_separation_rounds": 20}
SECAGG = {"clip_norm": 2.0, "bits": 6}
PROMISES = {
    "gaussian": {},
    "tree": {"mechanism": "tree"},
    "banded": {"mechanism": "banded", "bands": 4},
    "distributed": {"mechanism": "distributed"},
    "less noise than lasts": {"noise_multiplier": 1.0},
}


@pytest.fixture
def doors(tmp_path, monkeypatch):
    with opened(tmp_path, monkeypatch) as doors:
        yield doors


def lasting(task, plan):
    """For how many rounds the budget of a task lasts, and the ε that its ledger has then, or after all rounds."""
    privacy, goal = task.settings.promise, task.settings.goal

    def entry(number):
        if privacy.noise_of_devices:
            return entry_of_devices(task.settings, plan.report, number, goal)
        return entry_of(privacy, number, 2.0, goal)

    def after(rounds):
        return spent([entry(number) for number in range(1, rounds + 1)], privacy.delta)

    # More rounds spend more, so the first round that is one too many is found by halving.
    every = range(1, task.settings.rounds + 1)
    lasts = bisect_right(every, privacy.epsilon, key=after)
    return lasts, after(lasts) if lasts else 0.0


@pytest.mark.parametrize("named", PROMISES)
def test_the_same_numbers_make_the_same_task_at_each_door(doors, named):
    settings = SETTINGS | {"privacy": BUDGET | PROMISES[named]}
    if named == "distributed":
        settings |= {"secagg": SECAGG}
    made = {door.__name__: door(doors, settings) for door in DOORS}
    known = {task.id: task for task in doors.store.tasks()}
    assert set(made.values()) == set(known), made
    tasks = [known[one] for one in made.values()]
    assert {repr(task.settings) for task in tasks} == {repr(tasks[0].settings)}
    rounds, epsilon = lasting(tasks[0], doors.bundle.plan)
    promise = tasks[0].settings.promise
    assert (promise.min_separation_rounds, promise.users, math.isfinite(promise.noise_multiplier)) == (20, 1000, True)
    if "noise_multiplier" not in PROMISES[named]:
        assert rounds == ROUNDS
        assert 0.9 * promise.epsilon < epsilon <= promise.epsilon
        more = replace(tasks[0], settings=replace(tasks[0].settings, rounds=2 * ROUNDS))
        assert lasting(more, doors.bundle.plan)[0] < 2 * ROUNDS  # the noise is the least, and no more than that
    else:
        assert rounds == 40
        assert promise.noise_multiplier == PROMISES[named]["noise_multiplier"]


WRONG = [
    ({"delta": 0.5}, "delta must be below 1 / users, which is 0.001, not 0.5"),
    ({"epsilon": 0.0}, "epsilon"),
    ({"epsilon": None}, "privacy: epsilon is missing: it must be a number above 0"),
    ({"noise_multiplier": 0.0}, "noise_multiplier"),
    ({"mechanism": "banded", "bands": 30}, "bands must be from 2 to min_separation_rounds (20), not 30"),
    ({"mechanism": "gauss"}, "mechanism"),
    ({"noise_multiplier": 0.01}, "noise_multiplier 0.01 the first round alone spends"),
]


def test_a_promise_that_cannot_be_is_refused_alike_at_each_door(doors):
    for (wrong, words), door in product(WRONG, DOORS):
        given = {name: value for name, value in (BUDGET | wrong).items() if value is not None}
        said = " ".join(door(doors, SETTINGS | {"privacy": given}).split())
        assert words in said, (wrong, door.__name__)
    assert doors.store.tasks() == []


def test_a_separation_of_rounds_is_said_once_in_the_settings_of_the_task(doors):
    for door in set(DOORS) - {Doors.form}:  # whose fields are those of the settings
        said = door(doors, SETTINGS | {"privacy": BUDGET | {"min_separation_rounds": 20}})
        assert "there is no 'min_separation_rounds'" in said, door.__name__


ONE = PrivacyBudget(epsilon=1.0, delta=1e-6, users=1000)
PHONES = ("privacy", "budget", "--population", "phones")


@pytest.fixture
def task(served, tmp_path):
    _, _, store, _ = served
    settings = TaskSettings(population="phones", goal=2, rounds=2, privacy=ONE)
    return store.register_task(make_private_bundle(tmp_path / "private"), settings, name="the first").id


def test_budget_is_set_shown_and_removed_on_the_store_and_over_http(served, task):
    near, far, store, _ = served
    for where in (near, far):
        shown = in_process(*PHONES, "--epsilon", 2, "--delta", "1e-6", *where)
        assert shown.exit_code == 0, shown.output
        line = next(line for line in shown.stdout.splitlines() if task in line)
        assert line.split() == [task, "the", "first", "training", "active", "0", "of", "2", "1", "1"]
        facts = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines()[-4:] if line)
        assert facts["left"] == "ε 1"
        assert facts["budget"] == "ε 2 at δ 1e-06"
        assert "a device that enrols anew is a new one" in facts["of"]
        assert json.loads(in_process(*PHONES, "--json", *where).stdout)["left"] == pytest.approx(1)
        removed = in_process(*PHONES, "--remove", *where)
        assert "none is set: no task is refused" in removed.stdout
    assert store.budget("phones").budget is None


def test_half_a_budget_is_refused_with_what_is_missing(served, task):
    near = served[0]
    for given in (["--epsilon", 2], ["--delta", "1e-6"]):
        assert "give both" in in_process(*PHONES, *given, *near).stderr
    assert "leave --epsilon and --delta out" in in_process(*PHONES, "--remove", "--epsilon", 2, *near).stderr
    for where in served[:2]:
        kind, words = failure(in_process(*PHONES, "--epsilon", "nan", "--delta", "1e-6", *where))
        assert kind is InvalidBudget
        assert words.startswith("epsilon must be a number above 0 and at most 1,000,000, not nan")


def test_python_has_the_budget_and_the_refusal_of_a_task(served, task, tmp_path):
    _, far, store, _ = served
    with muster.Coordinator(far[1], os.environ["MUSTER_TOKEN"]) as coordinator:
        made = coordinator.set_budget("phones", epsilon=1.5, delta=1e-6)
        assert made == coordinator.budget("phones") == store.budget("phones")
        assert made.budget == PopulationBudget(epsilon=1.5, delta=1e-6)
        with pytest.raises(BudgetExceeded, match="'hand-made' promises no privacy"):
            coordinator.create(make_bundle(tmp_path / "plan"), population="phones", goal=2, rounds=2)
        assert coordinator.remove_budget("phones").budget is None


def epsilon(**options):
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = in_process("privacy", "epsilon", *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["epsilon"]


@pytest.mark.parametrize(
    ("options", "expected", "within"),
    [
        # Balle, Wang 2018: the exact ε of one Gaussian.
        ({"noise_multiplier": 1, "rounds": 1, "delta": 1e-5}, 4.3772, 1e-3),
        # √T of them are one of a T-th of the variance.
        ({"noise_multiplier": 10, "rounds": 100, "delta": 1e-5}, 4.3772, 1e-3),
        # A device that is in one round of ten, over a hundred rounds, is in ten.
        ({"noise_multiplier": 10**0.5, "rounds": 100, "delta": 1e-5, "min_separation_rounds": 10}, 4.3772, 1e-3),
        # Kairouz et al. 2021: in a tree of 2^k rounds a device of one round is in k + 1 blocks.
        (
            {"noise_multiplier": 7**0.5, "rounds": 64, "delta": 1e-5, "mechanism": "tree", "min_separation_rounds": 64},
            4.3772,
            1e-3,
        ),
        # Two bands, 1 and ½, give every column but the last the squared length 5/4.
        (
            {
                "noise_multiplier": 1.25**0.5,
                "rounds": 10,
                "delta": 1e-5,
                "mechanism": "banded",
                "bands": 2,
                "min_separation_rounds": 10,
            },
            4.3772,
            1e-3,
        ),
    ],
)
def test_epsilon_is_that_which_others_find(options, expected, within):
    assert epsilon(**options) == pytest.approx(expected, rel=within)


def test_sampled_rounds_spend_less_than_a_looser_accountant_published():
    # The MNIST table of TensorFlow Privacy: noise 1.1, batches of 256 of 60,000, 60 epochs; RDP says 3.01.
    sampled = epsilon(noise_multiplier=1.1, rounds=14062, delta=1e-5, sampling_probability=256 / 60000)
    assert 0.75 * 3.01 < sampled < 3.01


def test_noise_of_devices_costs_a_little_more_than_gaussian_noise():
    facts = {"noise_multiplier": 4, "rounds": 20, "delta": 1e-6}
    assert 1 < epsilon(**facts, mechanism="distributed") / epsilon(**facts) < 1.25


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mechanism": "laplace"}, "mechanism must be one of gaussian, tree, banded, distributed, not laplace"),
        ({"mechanism": "banded"}, "bands must be from 2"),
        ({"mechanism": "tree", "sampling_probability": 0.5}, "sampling_probability below 1 is for"),
        ({"delta": 1}, "delta must be above 0 and below 1"),
        ({"noise_multiplier": 0}, "noise_multiplier"),
    ],
)
def test_what_no_accountant_can_count_is_refused_with_the_reason(options, said):
    facts = {"noise_multiplier": 1, "rounds": 2, "delta": 1e-5} | options
    words = [word for name, value in facts.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = in_process("privacy", "epsilon", *words)
    assert done.exit_code != 0
    assert said in f"{done.output}{done.exception}"


TRAINED = [
    *("--model", "logreg", "--clients", 100, "--cohort", 20, "--rounds", 4, "--engine", "torch", "--processes", 1),
    *("--set", "clip_norm=0.5", "--privacy", "delta=1e-4"),
]
FED_AVG = ["--set", "weighting=uniform"]
DISTRIBUTED = [
    *("--privacy", "epsilon=50", "--privacy", "mechanism=distributed"),
    *("--secagg", "--clip-norm", "0.5", "--bits", "10"),
]


def run(folder, *options):
    done = in_process("simulate", *TRAINED, *options, "--out", folder)
    assert done.exit_code == 0, done.output
    return json.loads((folder / "result.json").read_bytes())


def verify(folder):
    done = in_process("privacy", "verify", folder, "--json")
    return done.exit_code, json.loads(done.stdout)


def test_a_folder_tells_every_number_of_its_epsilon(tmp_path):
    result = run(tmp_path / "run", *FED_AVG, "--privacy", "noise_multiplier=2", "--privacy", "poisson=true")
    told = result["privacy"]
    assert (told["mechanism"], told["noise_multiplier"], told["delta"]) == ("gaussian", 2.0, 1e-4)
    assert told["sampling_probability"] == 20 / result["train_users"] == 20 / told["users"]
    accountant = dp_accounting.pld.PLDAccountant()
    gaussian = dp_accounting.GaussianDpEvent(told["noise_multiplier"])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(told["sampling_probability"], gaussian), result["rounds"])
    assert result["epsilon"] == pytest.approx(accountant.get_epsilon(told["delta"]), rel=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        [*FED_AVG, "--privacy", "epsilon=3"],
        [*FED_AVG, "--privacy", "epsilon=3", "--privacy", "mechanism=tree", "--privacy", "min_separation_rounds=3"],
        ["--algorithm", "mime", "--same-cohort", "--privacy", "epsilon=3", "--privacy", "poisson=true"],
        [*FED_AVG, *DISTRIBUTED],
    ],
)
def test_the_epsilon_of_a_run_is_computed_again_from_its_folder(tmp_path, options):
    result = run(tmp_path / "run", *options)
    code, verdict = verify(tmp_path / "run")
    assert (code, verdict["wrong"], verdict["epsilon"]) == (0, [], result["epsilon"])
    said = in_process("privacy", "verify", tmp_path / "run").stdout
    assert "holds" in said
    assert str(result["privacy"]["delta"]) in said


def test_an_epsilon_that_the_rounds_do_not_spend_is_named(tmp_path):
    good = run(tmp_path / "run", *FED_AVG, "--privacy", "noise_multiplier=2")
    for changed in (
        {"epsilon": good["epsilon"] / 2},
        {"privacy": good["privacy"] | {"noise_multiplier": 4.0}},
        {"privacy": good["privacy"] | {"delta": 1e-5}},
        {"rounds": 3},
    ):
        (tmp_path / "run" / "result.json").write_text(json.dumps(good | changed))
        code, verdict = verify(tmp_path / "run")
        assert (code, len(verdict["wrong"])) == (1, 1), changed
    assert math.isclose(verdict["epsilon"], good["epsilon"])


def test_a_run_that_is_not_private_or_has_not_ended_is_no_claim(tmp_path):
    assert in_process("simulate", *TRAINED[:12], "--rounds", 2, "--out", tmp_path / "plain").exit_code == 0
    done = in_process("privacy", "verify", tmp_path / "plain")
    assert done.exit_code == 2
    assert "is not private" in done.stderr
    run(tmp_path / "run", *FED_AVG, "--privacy", "noise_multiplier=2")
    assert in_process("privacy", "verify", tmp_path / "run", "--signer", "ed25519:a").exit_code == 2
    (tmp_path / "run" / "result.json").unlink()
    done = in_process("privacy", "verify", tmp_path / "run")
    assert done.exit_code == 2
    assert "has not ended" in done.stderr
