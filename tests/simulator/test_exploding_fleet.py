"""Training that explodes on a fleet, in the clear and under masks: its task is paused within a few rounds."""

import pytest

from coordinator.rules.progress import START
from coordinator.rules.states import RoundState, TaskState
from coordinator.store.tasks import Secagg, TaskSettings
from device_runtime.permission.policy import Policy
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.signing import SigningKey
from simulator import datasets
from simulator.fleet.fleet import Fleet, FleetConfig
from tests.coordinator.fork_server import wait_until

GOAL, ROUNDS, SEED = 8, 6, 11
EXPLODING = [
    ("digits_cnn", "fedavg", {"client_lr": 3.0, "batch_size": 4}),
    pytest.param("mlp", "fedavg", {"client_lr": 30.0}, marks=pytest.mark.long),
    pytest.param("mlp", "fedavg", {"client_lr": 300.0}, marks=pytest.mark.long),
    pytest.param("mlp", "fedadam", {"server_lr": 10.0}, marks=pytest.mark.long),
]


@pytest.fixture
def train(tmp_path, coordinators, servers):
    """Run rounds of a fleet until its task is paused; gives the task and the committed rounds."""

    def run(algorithm, settings, model_name="mlp", secagg=None):
        users, _ = datasets.users("digits", None, 12)
        model = Model(load(model_name, (1, 8, 8), 10), SEED)
        bundle = export_bundle(model, create(algorithm, settings), tmp_path / "plan")
        key = SigningKey.new(tmp_path / "release.pem")
        of_task = TaskSettings(population="p", goal=GOAL, rounds=ROUNDS + 1, over_selection=1.0, secagg=secagg)
        with coordinators.local(tmp_path, SEED, secure=secagg is not None) as local:
            task = local.create_task(bundle, of_task, key).id
            policy = Policy(signers=(key.signer,)) if secagg else None
            config = FleetConfig(
                coordinator=local.url,
                population="p",
                folder=tmp_path / "devices",
                concurrency=GOAL,
                sessions=GOAL,
                policy=policy,
            )
            for number in range(1, ROUNDS + 1):
                Fleet(config, users.subset(users.sample(GOAL, SEED, number))).run(servers=servers)
                wait_until(lambda done=number: sum(one.state.ended for one in local.store.rounds(task)) >= done)
                if local.store.task(task).state is TaskState.PAUSED:
                    break
            return local.store.task(task), local.store.rounds(task)

    return run


@pytest.mark.parametrize(("model", "algorithm", "settings"), EXPLODING)
def test_training_that_explodes_on_devices_pauses_its_task(model, algorithm, settings, train, capsys):
    """Every run has a convolution."""
    task, rounds = train(algorithm, settings, model)
    with capsys.disabled():
        print(f"\n{algorithm} {settings}: {[one.metrics['train.loss'] for one in rounds]}, {task.reason}")
    assert task.state is TaskState.PAUSED
    assert task.reason.startswith(f"diverged in round {len(rounds)}: ")
    assert len(rounds) <= 3


@pytest.mark.parametrize(
    ("algorithm", "settings"), [pytest.param("fedavg", {"client_lr": 0.3}, marks=pytest.mark.long), ("fedadam", {})]
)
def test_training_that_learns_on_devices_pauses_no_task(algorithm, settings, train):
    """Every run has the algorithm whose steps are the longest."""
    task, rounds = train(algorithm, settings)
    assert task.state is TaskState.ACTIVE
    assert [one.state for one in rounds[:ROUNDS]] == [RoundState.COMMITTED] * ROUNDS
    assert rounds[0].metrics[START] == 3.0


def test_training_that_explodes_under_masks_pauses_its_task(train):
    task, rounds = train("fedavg", {"client_lr": 300.0}, secagg=Secagg(clip_norm=4.0, max_examples=120, group_size=16))
    assert task.state is TaskState.PAUSED
    assert len(rounds) <= 3
    assert rounds[0].metrics[START] == 3.0
