"""A training on a Ray cluster of several machines, each emulated by a daemon of its own with its own processes."""

import os
import threading

import pytest

from fedcore.algorithms.fed_avg import FedAvg
from simulator.engines.workers.ray_cluster import connect
from tests.simulator.test_ray import agree, engine


@pytest.fixture
def two_machines():
    """A cluster, and the machine that may be taken from it."""
    import ray  # takes a second, in every process that collects tests
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield cluster, cluster.add_node(num_cpus=1)
    ray.shutdown()
    cluster.shutdown()


def stuck(begun, lost, machine):
    """FedAvg with which a worker on one machine never ends the block that it began, and others begin none before.

    begun, lost: pipes on which that worker tells that it is at its block, and others hear that the machine is lost.
    """
    gate = [lost]

    class Stuck(FedAvg):
        def report(self, broadcast, carries):
            import ray

            if broadcast["params"].device.type == "cpu":  # else it is a rehearsal, on no device
                if ray.get_runtime_context().get_node_id() == machine:
                    begun.write_bytes(b"")
                    threading.Event().wait()
                while gate:
                    gate.pop().read_bytes()
            return super().report(broadcast, carries)

    return Stuck(batch_size=5)


@pytest.mark.long
def test_a_training_outlives_a_machine_of_its_cluster(two_machines, tmp_path):
    cluster, machine = two_machines
    begun, lost = tmp_path / "begun", tmp_path / "lost"
    os.mkfifo(begun)
    os.mkfifo(lost)
    assert connect(cluster.address, None) == 2

    def lose_machine():
        begun.read_bytes()
        cluster.remove_node(machine, allow_graceful=False)
        lost.write_bytes(b"")

    loss = threading.Thread(target=lose_machine)
    loss.start()
    agree(engine(FedAvg(batch_size=5), on_ray=False), engine(stuck(begun, lost, machine.node_id), on_ray=True))
    loss.join()
