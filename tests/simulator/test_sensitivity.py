"""The sensitivity of a training to rounding, by which the keystone judges what it cannot demand of kinked networks."""

import pytest

from benchmarks.sensitivity import sensitivity
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from simulator import datasets
from simulator.engine import Engine
from tests.simulator.federation import SEED


@pytest.mark.parametrize(
    ("name", "trips"), [("fedavg", 1), ("scaffold", 1), pytest.param("mime", 2, marks=pytest.mark.long)]
)
def test_a_training_is_as_sensitive_as_the_rounding_is_coarse(name, trips):
    users, _ = datasets.users("digits", None, 2)
    model, cohort = Model(load("logreg", (1, 8, 8), 10), SEED), dict(enumerate(users.clients))

    def found(error):
        algorithm, cohorts, errors = create(name, {"batch_size": 300}), [cohort] * trips, [error] * trips
        return sensitivity(lambda one: Engine(model, one, users, seed=SEED), algorithm, users, cohorts, errors)

    plain, fine, coarse = found(0), found(1e-5), found(1e-4)
    assert 0 < plain < 1e-5 < fine
    assert coarse == pytest.approx(10 * fine, rel=0.1)
