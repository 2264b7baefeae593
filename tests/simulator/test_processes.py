"""Any number of processes gives the same result, bit for bit, and what goes wrong in one is said."""

import dataclasses
import gc
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest

from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.validation import decoder
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.engines.graphs import export_graphs
from simulator.engines.processes import compute_apart, usable_cores
from simulator.errors import EngineError, ProcessDied
from tests.sampled import sampled
from tests.simulator.test_engine import uneven

POPULATION = uneven((3, 17, 5, 12, 1, 30, 9, 4, 11, 6))


def engine(name, processes, *, on_graphs=False, spec=None):
    local = "*.bias" if name == "fedrep" else ""
    model, algorithm = Model((spec or load("logreg")).with_local(local)), create(name, {"batch_size": 5})
    graphs = export_graphs(model, algorithm) if on_graphs else None
    computing = Computing(graphs=graphs, processes=processes, at_once=2)
    return Engine(model, algorithm, POPULATION, seed=7, computing=computing)


@pytest.mark.parametrize(
    ("name", "on_graphs"),
    sampled(
        [("scaffold", False), ("fedrep", False), ("fedavg", False), ("mime", True)],
        [("scaffold", False), ("mime", True)],
    ),
)
def test_the_number_of_processes_changes_no_bit(name, on_graphs):
    """Every run has clients with a state of their own, and graphs."""
    first, *others = (engine(name, count, on_graphs=on_graphs) for count in (1, 2, 3))
    for number, cohort in enumerate([range(10), [7, 1], [2, 0, 1, 9, 4]], start=1):
        expected = first.run_round(number, cohort)
        for other in others:
            assert other.run_round(number, cohort) == expected
            for ours, theirs in ((first.state, other.state), (first.client_states, other.client_states)):
                assert {key: vector.tobytes() for key, vector in ours.items()} == {
                    key: vector.tobytes() for key, vector in theirs.items()
                }
    assert any(vectors.any() for vectors in first.client_states.values()) is (name in {"scaffold", "fedrep"})


def test_processes_start_as_blocks_need_them_and_end_with_the_engine():
    before = set(multiprocessing.active_children())
    one = engine("fedavg", 3)
    assert set(multiprocessing.active_children()) == before
    one.run_round(1, [0, 1])
    assert len(set(multiprocessing.active_children()) - before) == 1
    one.run_round(2, range(10))
    assert len(set(multiprocessing.active_children()) - before) == 3
    del one
    gc.collect()
    assert set(multiprocessing.active_children()) == before


def test_a_process_that_ends_is_named_and_the_round_can_be_run_again():
    before, one, other = set(multiprocessing.active_children()), engine("fedavg", 2), engine("fedavg", 1)
    one.run_round(1, range(10))
    for process in set(multiprocessing.active_children()) - before:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match="a process of the engine ended with exit code -9; this usually means"):
        one.run_round(2, range(10))
    one.run_round(2, range(10))
    for number in (1, 2):
        other.run_round(number, range(10))
    np.testing.assert_array_equal(one.state["params"], other.state["params"])


def test_what_a_model_does_wrong_in_a_process_is_said():
    spec = load("logreg")

    def broken(outputs, label):
        raise ValueError("no such loss")

    with pytest.raises(EngineError, match=r"the model logreg does not run here: .*no such loss"):
        engine("fedavg", 2, spec=dataclasses.replace(spec, loss=broken)).run_round(1, range(10))


class Broken(FedAvg):
    """An algorithm that fails in forked processes."""

    def report(self, broadcast, carries):
        if multiprocessing.parent_process() is not None:
            raise LookupError("no such vector")
        return super().report(broadcast, carries)


def test_what_an_algorithm_does_wrong_in_a_process_is_said():
    one = Engine(Model(load("logreg")), Broken(), POPULATION, computing=Computing(processes=2))
    with pytest.raises(EngineError, match="LookupError: no such vector"):
        one.run_round(1, range(10))


@pytest.mark.parametrize(("quota", "cores"), [("max 100000\n", 10**9), ("50000 100000\n", 1), ("100001 100000\n", 2)])
def test_usable_cores_are_no_more_than_a_containers_quota(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr("simulator.engines.processes.CPU_QUOTA", tmp_path / "cpu.max")
    assert usable_cores() == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores() == min(cores, len(os.sched_getaffinity(0)))


def test_processes_hold_no_pipe_of_the_process_that_forked_them():
    reads, writes = os.pipe()
    one = engine("fedavg", 2)
    one.run_round(1, range(10))
    os.close(writes)
    assert os.read(reads, 1) == b""  # the end, which waits for everybody who holds the pipe
    os.close(reads)


def test_a_forked_process_ends_with_a_killed_parent(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)

    def live():
        with path.open("wb", buffering=0) as fifo:
            threading.Event().wait(20)
            fifo.write(b"alive")

    parent = os.fork()
    if parent == 0:
        try:
            compute_apart(live, decoder(None))
        finally:
            os._exit(1)
    with path.open("rb") as fifo:  # once it is open, the process lives
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert fifo.read() == b""
