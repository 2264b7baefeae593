"""The engine's way on GPUs: on the CPU as far as it goes, with a capture that keeps its outputs as CUDA graphs do.

Tests with "on a GPU" in their names need one, or several, and are skipped elsewhere.
"""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from export.model import Model, ModelSpec, cross_entropy
from export.models import load
from fedcore.algorithms import ALGORITHMS, create
from fedcore.batching import StreamKey
from fedcore.plan import Field
from simulator.configuration import SimulationConfig
from simulator.engine import Engine, evaluate
from simulator.engines import computing as computing_module
from simulator.engines.computing import Computing, OnGpu
from simulator.engines.memory import ClientStates, Examples
from simulator.engines.recorded.program import Programs, padded
from simulator.engines.sums import Client, RoundSums, dealt, layouts_of
from simulator.engines.vectorised import VectorisedTrainer
from simulator.errors import EngineError
from simulator.simulation import simulate, training_of
from tests.simulator.test_engine import uneven

CPU = torch.device("cpu")
POPULATION = uneven((3, 17, 5, 12, 1, 20, 9, 4, 11, 6, 19, 8, 13))
COHORTS = [range(13), range(12, -1, -1), [5, 0, 3]]
IMAGE, LABEL = Field("x", "float32", (1, 8, 8)), Field("y", "int64", high=10)
on_gpus = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


class Held:
    """A capture whose replays write into the outputs of the first, as a CUDA graph does."""

    def __init__(self):
        self.captured, self.replayed = 0, 0

    def __call__(self, run):
        self.captured += 1
        held = {}

        def replay():
            self.replayed += 1
            for name, value in run().items():
                held[name] = held[name].copy_(value) if name in held else value.clone()
            return dict(held)

        return replay


def dropping():
    """A small network with dropout, which draws in every step."""
    layers = torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 10)
    return ModelSpec("dropping", lambda: torch.nn.Sequential(*layers), cross_entropy, (IMAGE,), LABEL)


def engines(name, settings, spec, monkeypatch, capture):
    """One as on a CPU, one whose steps are captured, and which copies the examples of its groups from the host."""
    model, algorithm = Model(spec), create(name, {"batch_size": 4} | settings)
    plain = Engine(model, algorithm, POPULATION, seed=7, computing=Computing(at_once=100))
    with monkeypatch.context() as patched:
        patched.setattr(computing_module, "Programs", lambda device, _: Programs(device, capture))
        _let_stay(patched, stays=False)
        return plain, Engine(model, algorithm, POPULATION, seed=7, computing=Computing(at_once=100))


@pytest.mark.parametrize(
    ("name", "settings", "spec"),
    [
        ("fedavg", {"client_optimizer": "adam", "client_lr": 0.01}, dropping()),
        ("mimelite", {}, load("logreg")),
        ("scaffold", {}, load("logreg")),
        ("personalisation", {}, dropping()),
        ("compare", {}, load("logreg")),
    ],
)
def test_captured_steps_reach_the_model_of_called_ones(name, settings, spec, monkeypatch):
    capture, captures = Held(), []
    plain, captured = engines(name, settings, spec, monkeypatch, capture)
    for number, cohort in enumerate([*COHORTS, *COHORTS], start=1):
        ours, theirs = plain.run_round(number, cohort), captured.run_round(number, cohort)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
        captures.append(capture.captured)
    for vectors, others in ((plain.state, captured.state), (plain.client_states, captured.client_states)):
        for key, vector in vectors.items():
            np.testing.assert_allclose(others[key], vector, rtol=0, atol=1e-5 * np.abs(vector).max(), err_msg=key)
    assert captures[0] > 0
    assert captures[2] == captures[5]  # graphs are met again
    assert capture.replayed > captures[5]


def test_a_captured_program_keeps_the_memory_that_its_graph_reads():
    programs, given, constant = [], torch.arange(3.0), torch.ones(3)

    def capture(run):  # a graph has addresses alone, and keeps nothing alive
        programs.append(weakref.ref(run.__self__))
        outputs = run()
        return lambda: dict(outputs)

    kept = Programs(CPU, capture)
    for _ in range(2):
        kept.run("key", lambda: {"sum": given * 2 + (constant + 1)}, [given], {})
        gc.collect()
        assert [program() is None for program in programs] == [False]


def test_a_gpu_trains_few_different_numbers_of_clients():
    for clients in (1, 7, 50, 333, 5000):
        numbers = [padded(active, clients) for active in range(1, clients + 1)]
        assert all(active <= number <= min(1.25 * active, clients) for active, number in enumerate(numbers, start=1))
        assert len(set(numbers)) <= 4 * clients.bit_length()


def test_examples_of_a_group_are_copied_where_all_do_not_fit():
    whole, copied = (Examples(CPU, POPULATION, whole=one) for one in (True, False))
    group = [4, 0, 7]
    fields, starts = copied.of(group)
    everything, places = whole.of(group)
    assert len(fields["y"]) == 1 + 3 + 4
    for client, start, place in zip(group, starts, places, strict=True):
        for name, array in POPULATION.shard(client).items():
            torch.testing.assert_close(fields[name][start : start + len(array)], torch.from_numpy(array))
            torch.testing.assert_close(everything[name][place : place + len(array)], torch.from_numpy(array))


def test_a_trainer_on_a_gpu_gives_its_sums_to_the_host():
    model, algorithm = Model(load("logreg")), create("fedavg", {"batch_size": 4})
    trainer = VectorisedTrainer(
        model, algorithm, POPULATION, ClientStates({}, range(13)), programs=Programs(CPU), at_once=lambda steps: 4
    )
    (layout,), received = layouts_of(model, algorithm), {"params": torch.from_numpy(model.initial)}
    clients = Computing(at_once=100).parts(model, _clients(range(13)))[0]
    vectors = [torch.full((layout.size,), torch.nan, dtype=torch.float64) for _ in range(2)]
    trainer.train(1, received, clients, RoundSums(layout, vectors[0]))
    OnGpu(trainer, CPU).train(1, received, clients, RoundSums(layout, vectors[1]))
    torch.testing.assert_close(*vectors, rtol=0, atol=0)


def _clients(members):
    ordered = sorted(members, key=lambda member: -int(POPULATION.sizes[member]))
    return [Client(member, StreamKey(0, 1, member)) for member in ordered]


def test_every_gpu_gets_its_share_of_long_clients():
    hands = Computing("cuda", processes=3).parts(Model(load("logreg")), _clients(range(13)))
    assert [len(hand) for hand in hands] == [5, 4, 4]
    assert sorted(client.index for hand in hands for client in hand) == list(range(13))
    totals = [sum(int(POPULATION.sizes[client.index]) for client in hand) for hand in hands]
    assert max(totals) - min(totals) <= max(POPULATION.sizes)
    assert len(dealt(_clients([1, 2]), 3)) == 2
    devices = [Computing("cuda", processes=3).of_process(number).device for number in range(3)]
    assert devices == ["cuda:0", "cuda:1", "cuda:2"]
    assert Computing("cuda", processes=3).home == "cpu"


def test_a_gpu_would_train_and_measure_in_single_precision():
    seen = []

    class Noting(torch.nn.Linear):
        def forward(self, x):
            seen.append(_precision())
            return super().forward(x.flatten(1))

    before = _precision()
    model = Model(ModelSpec("noting", lambda: Noting(64, 10), cross_entropy, (IMAGE,), LABEL))
    Engine(model, create("fedavg"), POPULATION).run_round(1, range(13))
    trained = len(seen)
    evaluate(model, model.initial, POPULATION)
    assert len(seen) > trained > 0
    assert set(seen) == {("ieee", "ieee", False)}
    assert before == _precision() != ("ieee", "ieee", False)  # what torch begins with, or another test left


def _precision():
    cudnn = torch.backends.cudnn
    return cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.allow_tf32


class Greedy(torch.nn.Linear):
    """A layer whose gradient fits in no memory."""

    def forward(self, x):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 PiB")
        return super().forward(x.flatten(1))


def test_memory_that_is_too_small_names_the_option_that_helps():
    spec = ModelSpec("greedy", lambda: Greedy(64, 10), cross_entropy, (IMAGE,), LABEL)
    engine = Engine(Model(spec), create("fedavg"), POPULATION, computing=Computing(at_once=5))
    with pytest.raises(EngineError, match=r"memory of cpu is too small for 5 clients at once; .* with --at-once"):
        engine.run_round(1, range(13))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("device", "says"),
    [("cuda", "cannot compute on 'cuda' here"), ("cuda:all", "torch sees no GPU here, .* take --device=cpu")],
)
def test_a_machine_without_a_gpu_says_so(device, says):
    with pytest.raises(EngineError, match=says):
        training_of(SimulationConfig(model="logreg", device=device, rounds=1))


def test_one_gpu_by_number_cannot_be_several_processes():
    with pytest.raises(EngineError, match=r"'cuda:1' is one GPU, which several processes .* --device=cuda:all"):
        training_of(SimulationConfig(model="logreg", device="cuda:1", processes=2))


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_simulation_trains_as_many_at_once_as_asked(at_once, monkeypatch):
    seen, train = [], VectorisedTrainer._train

    def noted(self, turn, broadcast, group, sums):
        seen.append(len(group.clients))
        train(self, turn, broadcast, group, sums)

    monkeypatch.setattr(VectorisedTrainer, "_train", noted)
    simulate(SimulationConfig(model="logreg", rounds=1, cohort=6, processes=1, engine="torch", at_once=at_once))
    assert seen == [at_once] * (6 // at_once)


def _let_stay(monkeypatch, *, stays):
    """Examples and client states stay on the compute device, or lie on the host."""
    monkeypatch.setattr("simulator.engines.memory.may_stay", lambda nbytes, device: stays)


def _trained(computing, name, settings, spec):
    model, algorithm = Model(spec), create(name, {"batch_size": 4} | settings)
    engine = Engine(model, algorithm, POPULATION, seed=7, computing=computing)
    for number, cohort in enumerate([*COHORTS, *COHORTS], start=1):
        engine.run_round(number, cohort)
    return model.initial, engine.state["params"]


def _off_by(ours, theirs, initial):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - initial)


ON_GPU = [
    *((name, {}, load("logreg")) for name in ALGORITHMS if name != "fedpa"),
    ("fedpa", {"samples": 2, "steps_per_sample": 2, "burn_in_steps": 1, "burn_in_rounds": 1}, load("logreg")),
    *((name, {}, load("digits_cnn")) for name in ("fedadam", "mimelite", "scaffold")),
    ("fedavg", {"client_optimizer": "adam", "client_lr": 0.01}, dropping()),
]


@on_gpus
@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(("name", "settings", "spec"), ON_GPU)
def test_graphs_on_a_gpu_reach_the_cpus_model(name, settings, spec, stays, monkeypatch, caplog):
    _let_stay(monkeypatch, stays=stays)
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(1) or replay(graph))
    initial, theirs = _trained(Computing("cpu"), name, settings, spec)
    _, ours = _trained(Computing("cuda"), name, settings, spec)
    assert caplog.messages == []  # every step was recorded and captured
    assert replays
    assert _off_by(ours, theirs, initial) < 1e-4


@on_gpus
def test_a_trainer_on_a_gpu_gives_its_sums_to_the_host_too():
    model, algorithm, totals = Model(load("logreg")), create("fedavg", {"batch_size": 4}), []
    (layout,), received = layouts_of(model, algorithm), {"params": torch.from_numpy(model.initial)}
    for computing in (Computing("cpu", at_once=100), Computing("cuda")):
        trainer = computing.hosted_trainer(model, algorithm, POPULATION, ClientStates({}, range(13)))
        totals.append(RoundSums(layout, torch.full((layout.size,), torch.nan, dtype=torch.float64)))
        trainer.train(1, received, _clients(range(13)), totals[-1])
    torch.testing.assert_close(totals[1].vector, totals[0].vector, rtol=1e-4, atol=1e-4)


# A process that has computed on a GPU, or only counted GPUs as this file does, can fork none that does.
_SEVERAL = """
from dataclasses import replace
import numpy as np
from export.model import Model
from export.models import load
from fedcore.algorithms import ALGORITHMS, create
from simulator import datasets
from simulator.engine import Engine
from simulator.engines.computing import Computing

if {gpus} == 1:
    Computing.of_process = lambda self, number: replace(self, device="cuda:0", processes=1)
population, model, algorithm = datasets.load("digits"), Model(load("logreg")), create("{name}")
found = []
for processes in (2, 1):  # with one, this process computes on a GPU, and can fork no other that does
    engine = Engine(model, algorithm, population, computing=Computing("cuda", processes=processes))
    for number in (1, 2, 3):
        engine.run_round(number, range(20))
    found.append(engine.state["params"])
both, one = found
np.testing.assert_allclose(both, one, rtol=0, atol=1e-6)
"""


@on_gpus
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_two_processes_on_a_gpu_reach_the_model_of_one(name):
    _run(_SEVERAL.format(gpus=1, name=name))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no two GPUs")
def test_rounds_on_all_gpus_reach_the_model_of_one():
    _run(_SEVERAL.format(gpus=2, name="fedavg"))


def _run(code):
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
