"""From training to prediction: a fleet trains and evaluates a model, and an app makes it its own."""

import numpy as np
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
from fedcore.signing import SigningKey
from muster.creating import Evaluated, starting_from
from muster.releasing_models import Source, evaluation_of, keep, next_release
from simulator import datasets
from simulator.fleet.fleet import Fleet, FleetConfig
from tests.coordinator.fork_server import wait_until
from tests.simulator.federation import SEED, give_keys

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
            assert store.roll_back_model(*MODEL).share == 0  # no version was before it, so it is withdrawn
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
