import functools
from contextlib import contextmanager

import pytest

from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.signing import SigningKey
from simulator.fleet.fork_servers import HERE, fork_servers
from tests.simulator.federation import federated


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """FedAvg on logistic regression: the task of tests that are not about training."""
    return export_bundle(Model(load("logreg")), create("fedavg", {"batch_size": 5}), tmp_path_factory.mktemp("logreg"))


@pytest.fixture(scope="session")
def servers():
    """What devices are forked from, for fleets that end in good order: one of them may use it at a time."""
    with fork_servers({HERE: ["onnxruntime"]}) as opened:
        yield opened


@pytest.fixture
def task(tmp_path, coordinators, bundle):
    """A coordinator process with one task, for the length of a block; gives its store, its URL and the task's id.

    A task with secure rounds is released by the key in `release.pem`.
    """
    key = SigningKey.new(tmp_path / "release.pem")

    @contextmanager
    def running(**settings):
        given = {"population": "p", "goal": 5, "rounds": 2, "over_selection": 1.2, "selection_timeout_s": 2.0}
        with coordinators.local(tmp_path, secure="secagg" in settings) as local:
            yield local.store, local.url, local.create_task(bundle, TaskSettings(**given | settings), key).id

    return running


@pytest.fixture
def federate(tmp_path, coordinators):
    """`federated` in this test's folder."""
    return functools.partial(federated, tmp_path, coordinators)
