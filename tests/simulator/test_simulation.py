"""A whole simulation: repeatable, and it learns."""

import pytest

from simulator.errors import EngineError
from simulator.simulation import SimulationConfig, simulate


def test_two_runs_with_one_seed_are_identical_and_another_seed_differs():
    config = {"model": "mlp", "algorithm": "mimelite", "rounds": 5, "cohort": 6}
    first, again = (simulate(SimulationConfig(seed=4, **config)) for _ in range(2))
    assert first == again
    assert simulate(SimulationConfig(seed=5, **config)).params_sha256 != first.params_sha256


@pytest.mark.parametrize("algorithm", ["mimelite", "fedadam"])
def test_real_phone_users_are_recognised_by_a_model_that_never_saw_them(algorithm, data):
    config = SimulationConfig(model="mlp", dataset="wisdm", data=data, algorithm=algorithm, rounds=60, cohort=10)
    result = simulate(config)
    # Guessing the most frequent activity reaches 0.38 over all users.
    assert result.test_accuracy > 0.6
    assert list(result.per_user) == ["p5", "p25", "p50", "p75", "p95"]
    assert sorted(result.per_user.values()) == list(result.per_user.values())
    assert (result.train_users, result.test_users) == (22, 6)


def test_the_curve_is_measured_as_often_as_asked_and_at_the_end():
    heard = []
    config = SimulationConfig(model="logreg", rounds=7, cohort=3, evaluate_every=3)
    result = simulate(config, lambda number, metrics: heard.append(number))
    assert heard == list(range(1, 8))
    assert [point["round"] for point in result.curve] == [3, 6, 7]
    assert result.curve[-1]["test.accuracy"] == result.test_accuracy


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"rounds": 0}, "rounds must be at least 1"), ({"held_out": 1.0}, "held_out"), ({"seed": -1}, "seed")],
)
def test_impossible_options_are_named(wrong, words):
    with pytest.raises(EngineError, match=words):
        SimulationConfig(model="mlp", **wrong)
