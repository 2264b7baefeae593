"""Training in the rounds of a twin: old reports start from old models, and who is slow is left out."""

from __future__ import annotations

import numpy as np
import pytest

from research.over_selection import SLOW_DIGITS, users_of
from simulator.configuration import SimulationConfig
from simulator.errors import ForecastError
from simulator.forecast.course import CommittedRound
from simulator.forecast.training import accuracy_over_time

WHOLE = {"client_lr": 0.5, "batch_size": 100, "epochs": 1}
"""A step over all examples of a device, so that one report is the next if the model is the same."""


def in_round(number, devices, behind):
    return CommittedRound(3600.0 * number, 3600.0 * number, 3600.0 * (number + 1), devices, behind)


def losses(rounds, algorithm="fedbuff", **settings):
    """The loss of training in each round: that of the models from which the reports start."""
    found = []
    config = SimulationConfig(
        model="logreg", dataset="digits", rounds=len(rounds), algorithm=algorithm, settings=WHOLE | settings
    )
    accuracy = accuracy_over_time(config, rounds, lambda number, point: found.append(point["train.loss"]))
    assert accuracy[-1][0] == len(rounds)
    return found


def test_old_reports_start_from_the_model_that_their_devices_were_given():
    devices = (0, 1, 2)
    fresh = losses([in_round(number, devices, (0, 0, 0)) for number in range(3)])
    old = losses([in_round(0, devices, (0, 0, 0)), in_round(1, devices, (1, 1, 1)), in_round(2, devices, (0, 0, 0))])
    assert fresh[2] < fresh[1] < fresh[0]
    assert old[1] == pytest.approx(old[0])
    assert fresh[2] < old[2] < fresh[1]


def test_fedbuff_moves_less_for_old_reports_and_fedavg_as_far():
    rounds = [in_round(0, (0, 1), (0, 0)), in_round(1, (0, 1), (1, 1)), in_round(2, (0, 1), (0, 0))]
    buffered = losses(rounds, weighting="uniform")
    averaged = losses(rounds, "fedavg", weighting="uniform")
    assert buffered[:2] == pytest.approx(averaged[:2])
    assert averaged[2] < buffered[2] < buffered[1]


def test_old_and_fresh_reports_of_a_round_count_by_age_and_examples():
    # Twice the same report is that report, whatever the weights; a fresh one beside it moves the model on.
    twice = losses([in_round(0, (0, 1), (0, 0)), in_round(1, (0, 1), (0, 1)), in_round(2, (0, 1), (0, 0))], "fedavg")
    fresh = losses([in_round(number, (0, 1), (0, 0)) for number in range(3)], "fedavg")
    assert twice[0] == pytest.approx(fresh[0])
    assert fresh[2] != pytest.approx(twice[2])
    assert twice[2] < twice[0]


def test_algorithm_that_cannot_take_old_reports_is_refused_by_name():
    rounds = [in_round(0, (0, 1), (0, 0)), in_round(1, (0, 1), (0, 1))]
    config = SimulationConfig(model="logreg", dataset="digits", rounds=2, algorithm="fedadam")
    with pytest.raises(ForecastError, match=r"algorithm fedadam does not train with .* take fedavg or fedbuff"):
        accuracy_over_time(config, rounds, lambda number, point: None)


def test_digits_of_slow_devices_are_held_by_no_others():
    slowest = np.arange(20) >= 16
    train, test = users_of(slowest, seed=0)
    slow = {int(label) for device in range(16, 20) for label in train.shard(device)["y"]}
    others = {int(label) for device in range(16) for label in train.shard(device)["y"]}
    assert slow == set(SLOW_DIGITS)
    assert others == set(range(8))
    assert set(test.shard(1)["y"]) == set(SLOW_DIGITS)
