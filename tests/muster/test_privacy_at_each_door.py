"""A privacy budget means the same at each door: the same numbers make the same task, whoever creates it, and how."""

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import product

import pytest

from coordinator.rules.private_sums import entry_of, entry_of_devices
from fedcore.privacy.accounting import spent
from tests.muster.doors import DOORS, Doors, opened

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
