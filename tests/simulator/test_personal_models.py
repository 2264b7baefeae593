"""Users measure on examples of their own, each by the model that it would use."""

import numpy as np
import pytest
import torch

from export.model import Model
from export.models import load
from fedcore.errors import InvalidSetting
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.engine import evaluate
from simulator.errors import Diverged, EngineError
from simulator.simulation import simulate, training_of
from simulator.training import FineTuning, fine_tuned
from tests.simulator.test_engine import uneven

FEDREP = {"algorithm": "fedrep", "local": "3.*", "own_examples": True}
SMALL = {
    "model": "mlp",
    "dataset": "digits",
    "clients": 12,
    "cohort": 4,
    "rounds": 4,
    "evaluate_every": 2,
    "processes": 1,
}


def config(**settings):
    return SimulationConfig(**{**SMALL, **settings})


def trained(**settings):
    """A training after two rounds, and the split of its users."""
    asked = config(**settings)
    training = training_of(asked)
    for number in (1, 2):
        training.run_round(number)
    users = datasets.load("digits", None, 12, None)
    return training, users.split_examples(asked.held_out, asked.seed)


def test_every_user_measures_the_shared_body_under_its_own_head():
    training, (_, test) = trained(**FEDREP)
    vectors, model = training.vectors(), Model(load("mlp", (1, 8, 8), 10).with_local("3.*"))
    heads = vectors["clients.own"]
    assert heads.shape == (12, 650)
    assert len({head.tobytes() for head in heads}) == 7  # of the six who trained, and the first one
    for user, accuracy in enumerate(training.measure(2)["accuracy"]):
        params = vectors["server.params"].copy()
        params[-650:] = heads[user]
        assert accuracy == evaluate(model, params, test.subset([user]))["accuracy"][0]


def test_all_users_train_and_hold_the_same_examples_out():
    ours, (train, test) = trained(**FEDREP)
    theirs, _ = trained(own_examples=True)
    for training in (ours, theirs):
        assert training.facts.train_users == len(train) == 12
        np.testing.assert_array_equal(training.test.fields["x"], test.fields["x"])
    model = Model(load("mlp", (1, 8, 8), 10))
    expected = evaluate(model, theirs.vectors()["server.params"], test)["accuracy"]
    np.testing.assert_array_equal(theirs.measure(2)["accuracy"], expected)


def test_fine_tuning_is_each_users_own_descent_from_the_shared_model():
    users, model = uneven((3, 17, 5)), Model(load("logreg"))
    tuned = fine_tuned(model, start := model.initial + 1, FineTuning(0.1, 2, 32), users, key=(0, 1), device="cpu")
    for user in range(3):
        y = torch.from_numpy(start.copy())
        batch = {name: torch.from_numpy(array) for name, array in users.shard(user).items()}
        for _ in range(2):
            leaves = {name: part.detach().requires_grad_() for name, part in model.tensors(y).items()}
            loss, _ = model.loss(leaves, batch, torch.ones(len(batch["y"])))
            y = y - 0.1 * torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(leaves.values()))])
        np.testing.assert_allclose(tuned[user], y.numpy(), rtol=0, atol=1e-6)


def test_fine_tuned_users_measure_their_own_models_and_nothing_stays():
    plain, (_, test) = trained(own_examples=True)
    tuned, (train, _) = trained(own_examples=True, fine_tune=3)
    before = tuned.vectors()
    accuracies = tuned.measure(2)["accuracy"]
    for name, vector in plain.vectors().items():
        np.testing.assert_array_equal(tuned.vectors()[name], vector)
        np.testing.assert_array_equal(before[name], vector)
    model = Model(load("mlp", (1, 8, 8), 10))
    tuning = FineTuning(epochs=3)
    models = fine_tuned(model, before["server.params"], tuning, train, key=(0, 2), device="cpu")
    for user, accuracy in enumerate(accuracies):
        assert accuracy == evaluate(model, models[user], test.subset([user]))["accuracy"][0]
    assert accuracies.mean() > plain.measure(2)["accuracy"].mean()


def test_a_model_that_fine_tuning_ruins_is_no_figure():
    users, model = uneven((3, 17, 5)), Model(load("logreg"))
    users.fields["x"][users.starts[1]] = np.inf
    with pytest.raises(Diverged, match="round 7: the fine-tuned models of 1 users are not finite"):
        fine_tuned(model, model.initial, FineTuning(), users, key=(0, 7), device="cpu")


def test_own_heads_serve_users_of_different_labels_better_than_one_model():
    users = {"partition": "shards:2", "clients": 20, "cohort": 10, "rounds": 10, "settings": {"epochs": 5}}
    shared, own = (simulate(config(**users | given)) for given in ({"own_examples": True}, FEDREP))
    assert own.user_mean > shared.user_mean + 0.1
    assert own.curve[-1]["test.user_mean"] == own.user_mean


def test_a_resumed_run_has_the_same_heads(tmp_path):
    training = training_of(asked := config(**FEDREP))
    training.run_round(1)
    kept = training.vectors()
    training.run_round(2)
    again = training_of(asked)
    again.restore(kept)
    again.run_round(2)
    assert again.digest() == training.digest()
    np.testing.assert_array_equal(again.measure(2)["accuracy"], training.measure(2)["accuracy"])


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"algorithm": "fedper", "own_examples": True}, InvalidSetting, "fedper keeps parameters on clients, and this"),
        (
            {"algorithm": "fedper", "local": "3.*"},
            EngineError,
            "fedper gives every user who trains a model of their own",
        ),
        ({**FEDREP, "fine_tune": 1}, EngineError, "measure it with own_examples, and without fine_tune"),
        (
            {**FEDREP, "baseline": "local", "processes": None},
            EngineError,
            "the baseline local has no server for fedrep to share with",
        ),
        ({"local": "3.*"}, InvalidSetting, "fedavg shares all parameters, and of this model 3.weight, 3.bias stay"),
        ({"fine_tune": 1}, EngineError, "fine_tune needs own_examples: held-out users have no examples to train on"),
        ({"own_examples": True, "hold_out_examples": 0.1}, EngineError, "leave hold_out_examples out"),
        ({"own_examples": True, "fine_tune": 1, "baseline": "pooled"}, EngineError, "not for the baseline pooled"),
        (
            {"own_examples": True, "model": "ridge", "baseline": "dane", "processes": None},
            EngineError,
            "for models of torch, not for the",
        ),
        ({"own_examples": True, "fine_tune": 1, "algorithm": "fedsgd"}, EngineError, "fedsgd has not both"),
        ({**FEDREP, "engine": "graphs"}, EngineError, "graphs cannot run this: fedrep keeps vectors on clients"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(settings, error, says):
    with pytest.raises(error, match=says):
        simulate(config(**settings))
