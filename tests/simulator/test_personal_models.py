"""Vectors and models that devices keep."""

import numpy as np
import pytest
import torch

from coordinator.rules.progress import Reason
from coordinator.rules.states import TaskState
from coordinator.store.tasks import TaskSettings
from device_runtime.device import Device
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.algorithms.facts import for_model
from fedcore.errors import InvalidSetting
from fedcore.signing import SigningKey
from muster.creating import Evaluated, starting_from
from muster.releasing_models import Source, evaluation_of, keep, next_release
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.engine import Engine, evaluate
from simulator.engines.computing import Computing
from simulator.engines.memory import ClientStates
from simulator.errors import Diverged, EngineError
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.population import Population
from simulator.simulation import simulate, training_of
from simulator.training import FineTuning, fine_tuned
from tests.coordinator.fork_server import wait_until
from tests.simulator.federation import SEED, give_keys
from tests.simulator.reference import reference_round
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


MODEL = ("p", "digits")


def test_a_trained_model_is_released_predicts_and_gets_personal(tmp_path, coordinators, servers):
    model, (users, _) = Model(load("logreg", (1, 8, 8), 10), SEED), datasets.users("digits", None, 8)
    give_keys(tmp_path / "devices", users)
    train, measure = (
        export_bundle(model, create(name, {"batch_size": 5}), tmp_path / name) for name in ("fedavg", "evaluate")
    )
    key = SigningKey.new(tmp_path / "release.pem")
    with coordinators.local(tmp_path, SEED) as local:
        store = local.store

        def done(bundle, rounds, evaluation=None):
            """The id of a task that the fleet has finished."""
            settings = TaskSettings(population="p", goal=4, rounds=rounds, over_selection=1.0)
            task = store.register_task(bundle, settings, evaluation=evaluation).id
            config = FleetConfig(coordinator=local.url, population="p", folder=tmp_path / "devices", concurrency=4)
            wait_until(lambda: store.progress_of(task).reason is not Reason.STARTING)
            Fleet(config, users.subset(range(4))).run(servers=servers)
            assert store.task(task).state is TaskState.COMPLETED
            return task

        trained = done(train, 2)
        with starting_from(store, measure, Evaluated(trained, None)) as (bundle, origin):
            figures = evaluation_of(store, done(bundle, 1, origin), source := Source(trained, 2))
        device = Device(local.url, "p", tmp_path / "mine.npz", tmp_path / "app", policy=Policy(signers=(key.signer,)))
        with device.model("digits") as opened:
            for number, round_number in ((1, 1), (2, 2)):
                params = store.checkpoint(trained, round_number)["params"]
                plan = train.manifest.plan
                made, parameters = next_release(
                    store, source, "digits", plan, params, key, evaluation=figures, forbid_older=False
                )
                keep(store, parameters)
                store.release_model(key.sign_statement(made))
                store.promote_model(*MODEL, number, 1.0)
                assert (opened.refresh(), opened.version) == (True, number)
                assert_predicts(opened, model, params)
            store.roll_back_model(*MODEL)
            assert (opened.refresh(), opened.version) == (True, 1)
            assert (
                store.roll_back_model(*MODEL, withdraw=True).share == 0
            )  # no version was before it, so it is withdrawn
            assert (opened.refresh(), opened.version) == (False, 1)
            late = Device(
                local.url, "p", tmp_path / "mine.npz", tmp_path / "late", policy=Policy(signers=(key.signer,))
            )
            with late.model("digits") as empty:
                assert (empty.refresh(), empty.version) == (False, None)
            assert_predicts(opened, model, store.checkpoint(trained, 1)["params"])
            shards = [users.shard(index) for index in range(8)]
            np.savez(
                tmp_path / "mine.npz", **{name: np.concatenate([one[name] for one in shards]) for name in ("x", "y")}
            )
            assert opened.personalise().kept
            asked = {"x": np.load(tmp_path / "mine.npz")["x"]}
            personal = opened.predict(asked)["output"]
    with device.model("digits") as offline:
        assert (offline.version, offline.personal) == (1, True)
        np.testing.assert_array_equal(offline.predict(asked)["output"], personal)
        offline.forget()
        assert_predicts(offline, model, store.checkpoint(trained, 1)["params"])


def assert_predicts(opened, model, params):
    """The app's outputs are torch's, of the model with these parameters."""
    x = np.random.default_rng(0).random((7, 1, 8, 8), np.float32)
    with torch.no_grad():
        tensors = model.tensors(torch.from_numpy(np.array(params)))
        wanted = torch.func.functional_call(model.module, tensors, (torch.from_numpy(x),))
    np.testing.assert_allclose(opened.predict({"x": x})["output"], wanted.numpy(), atol=1e-5)


COHORTS = [[0, 1, 2, 3], [3, 1], [2, 0, 1], [3]]


@pytest.mark.parametrize(
    ("name", "settings", "local"),
    [
        ("scaffold", {"option": "I"}, ""),
        ("scaffold", {"option": "II", "server_lr": 0.7}, ""),
        ("feddyn", {"alpha": 0.5}, ""),
        ("fedpd", {"eta": 2}, ""),
        ("fedper", {"client_optimizer": "momentum"}, "*.bias"),
        ("fedrep", {"head_epochs": 3}, "*.weight"),
    ],
)
def test_rounds_with_client_state_equal_the_readable_reference(name, settings, local):
    population, model = uneven((3, 17, 5, 12, 9)), Model(load("logreg").with_local(local))
    algorithm = create(name, {"batch_size": 5, "epochs": 2} | settings)
    algorithm = for_model(algorithm, model.metrics[1:], model.schema)
    engine = Engine(model, algorithm, population, seed=7, computing=Computing(at_once=2))
    state, kept = engine.state, [algorithm.init_client(torch.from_numpy(model.initial)) for _ in range(5)]
    for number, cohort in enumerate(COHORTS, start=1):
        engine.run_round(number, cohort)
        ours, shards = [kept[client] for client in cohort], [population.shard(client) for client in cohort]
        state = reference_round(model, algorithm, state, shards, number, 7, kept=ours, clients=len(population))
        for client, vectors in zip(cohort, ours, strict=True):
            kept[client] = vectors
    for key, vector in state.items():
        np.testing.assert_allclose(engine.state[key], vector, rtol=0, atol=1e-5 * np.abs(vector).max(), err_msg=key)
    for key, vectors in engine.client_states.items():
        expected = np.stack([client[key].numpy() for client in kept])
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=key)
        np.testing.assert_array_equal(vectors[4], kept[4][key])  # it was in no cohort


def test_diverging_client_keeps_what_it_had():
    population, model = uneven(), Model(load("logreg"))
    population.fields["x"][population.starts[1]] = np.inf
    engine = Engine(model, create("scaffold"), population)
    assert engine.run_round(1, [0, 1, 2]).excluded == 1
    kept = engine.client_states["c_i"]
    assert [bool(vector.any()) for vector in kept] == [True, False, True, False]
    # c stays the mean of all c_i: who was left out does not count in the share of clients either.
    np.testing.assert_allclose(engine.state["c"], kept.mean(0), rtol=0, atol=1e-7)


def test_most_algorithms_keep_nothing_on_clients():
    assert Engine(Model(load("logreg")), create("mimelite"), uneven()).client_states == {}


def test_client_states_that_do_not_fit_are_refused_with_their_size():
    with pytest.raises(EngineError, match=r"scaffold keeps 1,000 numbers .* 2,000,000,000 clients, 8,000.0 GB in all"):
        ClientStates.of(create("scaffold"), torch.zeros(1000), 2_000_000_000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_client_states_lie_where_the_engine_computes():
    population, model, algorithm = uneven(), Model(load("logreg")), create("scaffold", {"batch_size": 5})
    engines = [Engine(model, algorithm, population, computing=Computing(device=device)) for device in ("cpu", "cuda")]
    for engine in engines:
        for number, cohort in enumerate(COHORTS, start=1):
            engine.run_round(number, cohort)
    ours, theirs = (engine.client_states["c_i"] for engine in engines)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4 * np.abs(ours).max())


def test_a_copy_of_the_client_states_moves_nothing():
    engine = Engine(Model(load("logreg")), create("scaffold"), Population.of(["a"], [uneven().shard(0)]))
    engine.client_states["c_i"][:] = 1
    assert not engine.client_states["c_i"].any()
