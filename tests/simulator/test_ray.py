"""Runs over machines with Ray."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.algorithms.fed_avg import FedAvg
from simulator.configuration import SimulationConfig
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.engines.graphs import export_graphs
from simulator.engines.processes import connect
from simulator.errors import EngineError, ProcessDied
from simulator.simulation import simulate, training_of
from tests.simulator.test_engine import uneven

POPULATION = uneven((3, 17, 5, 12, 1, 30, 9, 4, 11, 6))
COHORTS = (range(10), [7, 1, 4], [2, 0, 1, 9, 4])


@pytest.fixture(scope="module")
def ray():
    """Ray, connected to a cluster of this machine alone, which has room for two workers."""
    import ray  # takes a second, in every process that collects tests

    assert connect("local", 2) == 2
    yield ray
    ray.shutdown()


def engine(algorithm, *, on_ray, on_graphs=False, spec=None):
    model = Model(spec or load("logreg"))
    graphs = export_graphs(model, algorithm) if on_graphs else None
    computing = Computing(graphs=graphs, processes=2 if on_ray else 1, at_once=2, on_ray=on_ray)
    return Engine(model, algorithm, POPULATION, seed=7, computing=computing)


def agree(alone, sharded):
    """Whether two engines get to the same bits, round by round."""
    for number, cohort in enumerate(COHORTS, start=1):
        assert sharded.run_round(number, cohort) == alone.run_round(number, cohort)
        for ours, theirs in ((sharded.state, alone.state), (sharded.client_states, alone.client_states)):
            assert {name: vector.tobytes() for name, vector in ours.items()} == {
                name: vector.tobytes() for name, vector in theirs.items()
            }


def dying(folder):
    """FedAvg of which every worker dies: SIGKILL ends it in the middle of a block."""

    class Dying(FedAvg):
        def report(self, broadcast, carries):
            if broadcast["params"].device.type == "cpu":  # else it is a rehearsal, on no device
                (folder / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().report(broadcast, carries)

    return Dying(batch_size=5)


MORTAL = """
import os
import signal
import torch
from fedcore.algorithms.fed_avg import FedAvg

class Mortal(FedAvg):
    name = "mortal"

    def report(self, broadcast, carries):
        vector = broadcast["params"]
        if isinstance(vector, torch.Tensor) and vector.device.type == "cpu" and not os.path.exists({path!r}):
            open({path!r}, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().report(broadcast, carries)
"""


@pytest.mark.long
def test_a_killed_worker_changes_no_bit(tmp_path):
    died = tmp_path / "died"
    (tmp_path / "mortal.py").write_text(MORTAL.format(path=str(died)))
    config = SimulationConfig(model="logreg", rounds=2, cohort=30, engine="torch", processes=1)
    words = "simulate --model logreg --rounds 2 --cohort 30 --engine torch --algorithm mortal:Mortal --ray local --json"
    # In a process of its own: Ray's threads and its failures do not end with a test.
    command = [sys.executable, "-m", "muster", *words.split(), "--processes", "2"]
    ended = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    if "timed out during startup" in ended.stderr:
        pytest.skip(f"Ray gives its own processes 15 s to start, too little on this machine now: {ended.stderr}")
    assert ended.returncode == 0, ended.stderr
    assert died.exists()
    assert json.loads(ended.stdout)["params_sha256"] == simulate(config).params_sha256


@pytest.mark.long
def test_a_cluster_of_two_cpus_has_room_for_two_workers(ray):
    with pytest.raises(EngineError, match="has 2 CPUs, and 3 workers need one each"):
        connect("auto", 3)
    assert connect("auto", None) == 2
    with pytest.raises(EngineError, match="has 0 GPUs, and 1 workers need one each"):
        connect("auto", None, on_gpus=True)


@pytest.mark.long
@pytest.mark.parametrize(("name", "on_graphs"), [("mime", True), ("scaffold", False)])
def test_two_trips_and_client_states_have_the_same_bits_on_ray(ray, name, on_graphs):
    algorithm = create(name, {"batch_size": 5})
    alone, sharded = (engine(algorithm, on_ray=on_ray, on_graphs=on_graphs) for on_ray in (False, True))
    agree(alone, sharded)
    assert any(vectors.any() for vectors in sharded.client_states.values()) is not on_graphs


@pytest.mark.long
def test_a_block_that_no_worker_survives_is_given_up(ray, tmp_path):
    one = engine(dying(tmp_path), on_ray=True)
    with pytest.raises(ProcessDied, match="4 workers of the Ray cluster died of one block; often the memory"):
        one.run_round(1, [0, 1])
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.long
def test_a_model_of_a_file_of_its_own_trains_on_ray(ray, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\nfrom export.models import load\nfrom dataclasses import replace\n"
        "class Linear(torch.nn.Sequential): pass\n"
        "def make(): return Linear(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "def linear(): return replace(load('logreg'), make=make)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    spec = load("my_models:linear")
    agree(*(engine(FedAvg(batch_size=5), on_ray=on_ray, spec=spec) for on_ray in (False, True)))


@pytest.mark.long
def test_what_goes_wrong_in_a_worker_is_said_and_can_be_mended(ray, tmp_path):
    def broken(outputs, label):
        if not (tmp_path / "mended").exists():
            raise ValueError("no such loss")
        return load("logreg").loss(outputs, label)

    one = engine(FedAvg(batch_size=5), on_ray=True, spec=dataclasses.replace(load("logreg"), loss=broken))
    with pytest.raises(EngineError, match=r"the model logreg does not run here: .*no such loss"):
        one.run_round(1, range(10))
    (tmp_path / "mended").touch()
    agree(engine(FedAvg(batch_size=5), on_ray=False), one)


@pytest.mark.long
def test_a_worker_with_another_torch_is_refused(ray, monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.12.9")
    with pytest.raises(EngineError, match=r"has torch .*, and the machine that started the training 2.12.9; install"):
        engine(FedAvg(batch_size=5), on_ray=True).run_round(1, range(10))


@pytest.mark.long
def test_a_simulation_on_ray_has_the_digest_of_one_process(ray):
    config = SimulationConfig(model="logreg", rounds=2, cohort=6, engine="torch", processes=1)
    sharded = simulate(dataclasses.replace(config, processes=2, ray="auto"))
    assert sharded == simulate(config)


@pytest.mark.parametrize("address", ["6379", "ray://head:10001", "head:port", "LOCAL"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(EngineError, match=r"a Ray cluster is auto, local or HOST:PORT, .*, not "):
        connect(address, None)


def test_an_address_where_nothing_or_no_cluster_answers_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer():
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(EngineError, match=f"something else than a Ray cluster answers at {address}"):
            connect(address, None)
        answering.join()
    with pytest.raises(EngineError, match=rf"no Ray cluster answers at {address}: .*refused; `ray start --head`"):
        connect(address, None)


def test_without_ray_the_way_to_install_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"ray is not installed: pip install 'muster-fl\[ray\]'"):
        connect("local", None)


def test_ray_is_refused_where_it_does_nothing():
    with pytest.raises(EngineError, match="ray is for federated training, not for the baseline local"):
        SimulationConfig(model="logreg", ray="auto", baseline="local")
    with pytest.raises(EngineError, match=r"'cuda:1' is one GPU, which several processes do not share"):
        training_of(SimulationConfig(model="logreg", ray="auto", device="cuda:1"))


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
