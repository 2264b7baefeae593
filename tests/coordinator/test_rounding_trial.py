"""The trial of algorithms under the rounding of secure rounds: who bears it, and who is refused with the numbers."""

import dataclasses

import pytest

from coordinator.errors import InvalidTask
from coordinator.rules.release import check_rounding, moved_by, rounding
from fedcore.algorithms import ALGORITHMS, create
from tests.coordinator.test_secure import SECURE

PARAMETERS = 60_000
STEP = 2 * 10 / (2**20 - 1)  # of clip_norm 10 in 20 bits


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_bears_the_rounding_with_its_own_settings(name):
    check_rounding(create(name), STEP, 8, PARAMETERS)
    assert moved_by(create(name), rounding(STEP, 8), PARAMETERS) < 0.1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedadam", {"tau": 1e-8}),
        ("fedyogi", {"tau": 1e-8}),
        ("localadaalter", {"initial_b": 1e-3, "epsilon": 1e-3}),
        ("fedavg", {"client_lr": 1e-5}),
    ],
)
def test_an_algorithm_that_the_rounding_ruins_is_refused_with_the_numbers(name, settings):
    with pytest.raises(
        InvalidTask,
        match=rf"to 3\.4e-06 \(steps of 1\.9e-05 by clip_norm and bits, 8 devices\).* trial of {name} .*Lower",
    ):
        check_rounding(create(name, settings), STEP, 8, PARAMETERS)


def test_an_algorithm_of_ones_own_that_divides_by_squares_is_refused():
    name = "examples.custom_algorithm:FedAgree"
    custom = create(name, None, ["examples.custom_algorithm"])
    with pytest.raises(InvalidTask, match="times as far as training does"):
        check_rounding(custom, STEP, 8, PARAMETERS)
    check_rounding(custom, STEP / 1000, 8, PARAMETERS)


def test_less_rounding_moves_a_model_less():
    found = [moved_by(create("fedavg"), rounding(step, 8), PARAMETERS) for step in (STEP, STEP / 10, STEP / 100)]
    assert found[0] == pytest.approx(10 * found[1]) == pytest.approx(100 * found[2])


def test_a_task_is_held_to_the_trial_only_where_its_rounds_are_secure(register):
    ruined = dataclasses.replace(SECURE["secagg"], bits=2, clip_norm=1e4)
    with pytest.raises(InvalidTask, match="secure aggregation rounds every mean"):
        register(**SECURE | {"secagg": ruined})
    register(**{name: value for name, value in SECURE.items() if name != "secagg"})
