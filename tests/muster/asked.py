"""Devices that answer questions: a fleet of a population's users, while a command asks."""

import threading
from contextlib import contextmanager, suppress

import numpy as np

from coordinator.rules.progress import Reason
from device_runtime.permission.policy import Policy
from simulator.errors import FleetError
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.population import Population
from tests.coordinator.fork_server import wait_until

FIELDS = ("--field", "x:int64:200", "--field", "s:float32", "--field", "y:uint8:5")
LABELS = 5


def population(clients):
    """Users with whole numbers, and fractions on a grid, so that sums are exact."""
    source = np.random.default_rng(0)
    return Population.of(
        [f"user-{user}" for user in range(clients)],
        [
            {
                "x": source.integers(0, 200, rows),
                "s": (source.integers(0, 64, rows) / 16).astype(np.float32),
                "y": source.integers(0, LABELS, rows).astype(np.uint8),
            }
            for rows in source.integers(5, 40, clients)
        ],
    )


@contextmanager
def answering(local, users, servers, folder, signer=None):
    """Users' devices, awake once the coordinator has opened a task's round, until it has no more work.

    A device that came earlier would hear that there is no task, and a fleet ends at that answer.
    """
    config = FleetConfig(
        coordinator=local.url,
        population="phones",
        folder=folder,
        concurrency=len(users),
        policy=None if signer is None else Policy(signers=(signer,)),
    )

    def reason(task):
        return local.store.progress_of(task.id).reason

    def serve():
        wait_until(lambda: any(reason(task) is Reason.SELECTING for task in local.store.tasks()))
        with suppress(FleetError):  # where all of them are refused for good
            Fleet(config, users).run(servers=servers)

    devices = threading.Thread(target=serve)
    devices.start()
    try:
        yield
    finally:
        for task in local.store.tasks():
            if not task.state.ended:
                local.store.cancel(task.id)
        devices.join()
