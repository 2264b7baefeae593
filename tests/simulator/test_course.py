"""The course of a simulation: when a loss counts as exploding."""

import math

import pytest

from coordinator.rules.task_settings import MOST_LOSS_GROWTH
from simulator.training import LOSS, START, Watch


@pytest.mark.parametrize("name", ["train.loss", LOSS])
@pytest.mark.parametrize(
    ("loss", "explodes"),
    [(2 * MOST_LOSS_GROWTH, False), (2.001 * MOST_LOSS_GROWTH, True), (math.nan, True), (math.inf, True)],
)
def test_a_loss_explodes_that_is_ten_times_the_first_or_no_number(name, loss, explodes):
    watch = Watch([{"round": 1, name: 2.0}])
    assert watch.look({"round": 2, name: loss}) == explodes
    assert (watch.words is not None) == explodes


def test_losses_are_held_against_the_one_before_training():
    watch = Watch([{"round": 0, START: 1.0}])
    assert watch.look({"round": 1, LOSS: 1.001 * MOST_LOSS_GROWTH})
