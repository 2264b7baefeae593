"""A whole simulation: repeatable, and it learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcore.schedule import ServerSchedule
from simulator.configuration import SimulationConfig
from simulator.engine import Engine
from simulator.errors import EngineError
from simulator.simulation import completed, simulate
from simulator.training import Limits


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
    for point in result.curve:
        percentiles = [point[f"test.user_p{percent}"] for percent in (5, 25, 50, 75, 95)]
        assert percentiles == sorted(percentiles)
        assert percentiles[0] <= point["test.user_mean"] <= percentiles[-1]
    assert [result.curve[-1][f"test.user_{name}"] for name in result.per_user] == list(result.per_user.values())
    assert (result.rounds, result.ended_by) == (7, "rounds")


def test_a_simulation_ends_at_the_first_measurement_at_the_target():
    config = SimulationConfig(model="logreg", rounds=60, cohort=5, evaluate_every=2, target_accuracy=0.5)
    result = simulate(config)
    *before, last = [point["test.accuracy"] for point in result.curve]
    assert max(before) < 0.5 <= last
    assert (result.ended_by, result.rounds) == ("target_accuracy", result.curve[-1]["round"])
    whole = simulate(replace(config, target_accuracy=None, rounds=result.rounds))
    assert whole.params_sha256 == result.params_sha256


def test_neither_processes_nor_the_threads_of_torch_change_a_result():
    spread = SimulationConfig(model="logreg", rounds=1, cohort=3, engine="torch", settings={"batch_size": 64})
    results, before = [], torch.get_num_threads()
    try:
        for threads, processes in ((1, 1), (2, 1), (2, 2)):
            torch.set_num_threads(threads)
            results.append(simulate(replace(spread, processes=processes)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def course_of(losses):
    """Two rounds for each loss, of which the second is measured."""
    points = [({"round": 2 * n + 1}, {"round": 2 * n + 2, "test.loss": loss}) for n, loss in enumerate(losses)]
    return [point for pair in points for point in pair]


def test_patience_counts_the_rounds_since_the_lowest_loss():
    limits = Limits(rounds=100, target_accuracy=None, patience=4)
    assert limits.ending(course_of([3.0, 2.0, 2.5])) is None
    assert limits.ending(course_of([3.0, 2.0, 2.5, 2.0])) == "patience"
    assert limits.ending(course_of([3.0, 2.0, 2.5, 1.9])) is None
    assert limits.ending(course_of([3.0, 2.0, 2.5, 2.4])[:-1]) is None  # not measured
    assert limits.ending([]) is None


def test_a_simulation_whose_loss_does_not_fall_ends_early():
    config = SimulationConfig(
        model="logreg", settings={"client_lr": 1e-7}, rounds=40, cohort=2, evaluate_every=1, patience=3
    )
    result = simulate(config)
    losses = [point["test.loss"] for point in result.curve]
    assert result.ended_by == "patience"
    assert len(losses) - 1 - losses.index(min(losses)) == 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rounds": 0}, r"rounds must be a whole number from 1 to 2\^63 - 1, not 0"),
        ({"held_out": 1.0}, r"held_out must be a number above 0 and below 1, not 1\.0"),
        ({"seed": -1}, r"seed must be a whole number from 0 to 2\^63 - 1, not -1"),
        ({"patience": 0}, r"patience must be a whole number from 1 to 2\^63 - 1, not 0"),
        ({"target_accuracy": 80.0}, "target_accuracy must be a number above 0 and at most 1, not 80"),
    ],
)
def test_impossible_options_are_named(wrong, words):
    with pytest.raises(EngineError, match=words):
        SimulationConfig(model="mlp", **wrong)


def test_numbers_of_numpy_are_taken_as_pythons():
    numbers = {"rounds": np.int64(3), "target_accuracy": np.float32(0.5), "settings": {"client_lr": np.float32(0.5)}}
    config = SimulationConfig(model="logreg", **numbers)
    assert (type(config.rounds), config.target_accuracy) == (int, 0.5)
    assert completed(config).settings["client_lr"] == 0.5
    with pytest.raises(EngineError, match=r"rounds must be a whole number from 1 to 2\^63 - 1, not 1\.5"):
        SimulationConfig(model="logreg", rounds=np.float64(1.5))


def test_a_model_brings_settings_that_suit_it_where_none_are_given():
    def chosen(model="char_lstm", **settings):
        found = completed(SimulationConfig(model=model, algorithm="fedadam", settings=settings)).settings
        return found["batch_size"], found["client_lr"], found["server_lr"]

    assert chosen() == (4, 1.0, 0.03)
    assert chosen(client_lr=0.5) == (4, 0.5, 0.03)
    assert chosen(client_optimizer="adam") == chosen("word_lstm") == (20, 0.1, 0.03)


def test_a_schedule_grows_the_cohort_and_warms_up_the_server():
    cohorts, scales = [], []

    class Watching(Engine):
        def run_round(self, number, cohort, slots=None, schedule=None, expected=None):
            cohorts.append(len(cohort))
            scales.append(schedule.lr_scale(number, len(cohort)))
            return super().run_round(number, cohort, slots, schedule, expected)

    schedule = ServerSchedule(warmup_rounds=2, double_every=2, largest_cohort=7)
    config = {"model": "logreg", "rounds": 5, "cohort": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.simulation.Engine", Watching)
        scheduled = simulate(SimulationConfig(schedule=schedule, **config))
    assert (cohorts, scales) == ([2, 2, 4, 4, 7], [0.5, 1, 1, 1, 1])
    assert scheduled.params_sha256 != simulate(SimulationConfig(**config)).params_sha256
    warm = simulate(SimulationConfig(schedule=ServerSchedule(warmup_rounds=2), model="logreg", rounds=1, cohort=2))
    halved = SimulationConfig(settings={"server_lr": 0.5}, model="logreg", rounds=1, cohort=2)
    assert warm.params_sha256 == simulate(halved).params_sha256


def test_a_cohort_that_outgrows_the_users_is_refused_before_any_work():
    config = SimulationConfig(
        model="logreg", rounds=9, cohort=20, schedule=ServerSchedule(double_every=4, largest_cohort=90)
    )
    heard = []
    with pytest.raises(EngineError, match="a cohort of 80 cannot be drawn from 60 clients"):
        simulate(config, lambda number, metrics: heard.append(number))
    assert heard == []


def test_a_baseline_takes_no_schedule():
    with pytest.raises(EngineError, match="schedule is for federated training, not for the baseline local"):
        SimulationConfig(model="logreg", baseline="local", schedule=ServerSchedule(warmup_rounds=2))
