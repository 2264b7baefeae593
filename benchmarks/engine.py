"""The engine against bare torch steps, against its peers, and with several processes, each comparison in one run.

On a CPU times are CPU seconds of one thread, on a GPU wall seconds; the median over the rounds counts. The bare steps
run in a process of their own, as the allocator of this one is told to keep memory. A GPU is also held against all cores
of its machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks import engine_workloads
from benchmarks.engine_workloads import WORKLOADS, Workload, fedavg
from benchmarks.runner import EngineOptions
from benchmarks.usage import Peer, PeerError, Usage, cpu_s_of, family_of, in_turns, python_with, started
from export.model import Model
from fedcore.params import Float32
from muster.output import Say
from simulator.engine import Engine, evaluate
from simulator.engines import Wanted
from simulator.engines.choice import choose
from simulator.engines.computing import Computing, compute_device
from simulator.engines.memory import keep_freed_memory
from simulator.engines.processes import usable_cores
from simulator.errors import EngineError
from simulator.population import Population

# Processes of the engine, by the wall clock: two against one, with the memory that each takes, and one for each core.
#
# Each is measured in a fresh process: what this one holds would count as memory of those that it forks, and one that
# computes on a GPU can fork none.


# W1 with fewer clients: examples are not weighed, since processes share them.
FEW = msgspec.structs.replace(WORKLOADS["W1"], clients=200)
SCALING_TARGETS = {"two_processes_faster_by": 1.9, "peak_mb_besides_examples": 700.0}


def scaling(kind: Wanted, rounds: int) -> dict[str, Any]:
    """What `measure_scaling` gives, in a fresh process."""
    found: dict[str, Any] = _fresh(f"measure_scaling({kind!r}, {rounds})")
    return found


def seconds_on_cores(name: str, rounds: int) -> float:
    """What `measure_cores` gives for a workload, in a fresh process."""
    return float(_fresh(f"measure_cores(WORKLOADS[{name!r}], {rounds})"))


def _fresh(expression: str) -> Any:
    code = f"import json; from benchmarks.engine import *; print(json.dumps({expression}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True).stdout)


def measure_cores(workload: Workload, rounds: int) -> float:
    """Wall seconds of a round in a process for each core."""
    keep_freed_memory()
    return _median(in_turns({"all": _rounds(workload, Computing(processes=usable_cores()))}, rounds + 1, _WALL)["all"])


def measure_scaling(kind: Wanted, rounds: int, workload: Workload = FEW) -> dict[str, Any]:
    """Wall seconds of a round in one process and in two, in turns.

    peak_mb_besides_examples: of the process that took most while two trained, its peak in 2²⁰ bytes less the examples
    of the population, which all processes share.
    """
    keep_freed_memory()
    users = workload.population()
    two = choose(kind, workload.model(), fedavg(), users, Computing(processes=2)).computing
    # Two processes first: with one, this process trains, and grows.
    works = {"two": _rounds(workload, two, users), "one": _rounds(workload, replace(two, processes=1), users)}
    works["two"]()
    peak_mb = max(Usage.of(pid).peak_rss_mb for pid in family_of(os.getpid()))
    seconds = {name: _median(spent) for name, spent in in_turns(works, rounds + 1, _WALL).items()}
    return {
        "one_process_s": seconds["one"],
        "two_processes_s": seconds["two"],
        "two_processes_faster_by": seconds["one"] / seconds["two"],
        "peak_mb_besides_examples": peak_mb - sum(array.nbytes for array in users.fields.values()) / 2**20,
        "targets": SCALING_TARGETS,
    }


_WALL = time.perf_counter


def _median(spent: Sequence[float]) -> float:
    """The median of the rounds after the first, which forks and warms caches."""
    return statistics.median(spent[1:])


def _rounds(workload: Workload, computing: Computing, users: Population | None = None) -> Callable[[], object]:
    """The next round of an engine, at each call."""
    users = users or workload.population()
    engine, numbers = Engine(workload.model(), fedavg(), users, computing=computing), count()

    def train() -> None:
        number = next(numbers)
        engine.run_round(number, users.sample(workload.cohort, 0, number))

    return train


# The engine against its peers: other simulators, each in a process of its own, on the same cohorts in the same run.
#
# A round is everyone's turn, one after the other, so that ratios hold on a machine whose speed changes. Work is
# checked: everyone takes the same number of local steps, and reaches about the same loss.


RUNNERS = Path(__file__).with_name("peers")
PEERS: Mapping[str, tuple[str, str | None]] = {
    "pfl-research": ("run_pfl.py", "pfl.txt"),
    "FedJAX": ("run_fedjax.py", "fedjax.txt"),
    "Flower": ("run_flower.py", "flower.txt"),
    "plain torch loop": ("run_plain.py", None),
}
"""Each peer's runner, and its environment's requirements; without requirements it runs on this Python."""
BARE = "bare torch steps"
OURS: Wanted = "torch"
"""The engine that `--engine auto` takes for the workloads: Muster's figures are its."""
ENGINES: Sequence[Wanted] = ("graphs", OURS)
PROBE = 1000
"""The number of examples, the first ones, whose loss is compared, as in benchmarks/peers/turns.py."""
TOLERANCE = 0.1
"""How far a peer's fall of the loss may be from the engine's, relative: batches are drawn in another order."""
TARGETS = {"to_bare": {"W1": 0.75, "W2": 0.6, "W3": 0.6}, "best_peer_to_muster": {"W1": 1.3, "W2": 2.0, "W3": 4.0}}


def compare(
    rounds: int,
    say: Say,
    workloads: Mapping[str, engine_workloads.Workload] = engine_workloads.WORKLOADS,
    peers: Mapping[str, tuple[str, str | None]] = PEERS,
) -> dict[str, Any]:
    """CPU seconds of a round of every engine and peer on every workload, after one that warms caches and compiles.

    They are medians over the rounds. muster_is_faster: CPU seconds to those of Muster's engine OURS. Raises
    PeerError when a peer cannot be installed, fails, or does not do the same work.
    """
    if not RUNNERS.is_dir():
        raise PeerError(f"{RUNNERS} is missing: run this from a checkout of Muster")
    if not Path("/proc/self/stat").exists():
        raise PeerError("the CPU time of a peer with all its processes is only known on Linux")
    torch.set_num_threads(1)
    pythons = {
        name: python_with(RUNNERS / requirements, say) if requirements else Path(sys.executable)
        for name, (_, requirements) in peers.items()
    }
    turns: list[dict[str, Any]] = []
    for name, workload in workloads.items():
        with (
            tempfile.TemporaryDirectory(prefix="muster-peers-", ignore_cleanup_errors=True) as place,
            ExitStack() as stack,
        ):
            race = _Race(workload, rounds, Path(place), stack)
            for peer, (runner, _) in peers.items():
                say(f"{name}: start {peer}")
                race.enter(stack.enter_context(started(peer, pythons[peer], RUNNERS / runner, Path(place))))
            for number in range(rounds + 1):
                say(f"{name}: round {number} of {rounds}")
                race.round(number)
            turns += race.results(name)
    faster = {(turn["workload"], turn["by"]): turn["muster_is_faster"] for turn in turns}
    return {
        "rounds": rounds,
        "to_bare": {name: 1 / faster[name, BARE] for name in workloads},
        "best_peer_to_muster": {name: min(faster[name, peer] for peer in peers) for name in workloads},
        "targets": TARGETS,
        "turns": turns,
    }


class _Race:
    """A workload that all train on in turns. folder: takes the files for peers. stack: ends processes."""

    def __init__(self, workload: engine_workloads.Workload, rounds: int, folder: Path, stack: ExitStack) -> None:
        self._model, self._users = workload.model(), workload.population()
        # Forked before the allocator is told to keep memory.
        self._bare_seconds = stack.enter_context(
            engine_workloads.bare_seconds(self._model, self._users, torch.device("cpu"))
        )
        keep_freed_memory()
        self._cohorts = [self._users.sample(workload.cohort, 0, number) for number in range(rounds + 1)]
        _write(self._model, self._users, self._cohorts, folder)
        self._engines = {_label(kind): self._engine(kind) for kind in ENGINES}
        self._peers: dict[str, Peer] = {}
        self._spent: dict[str, list[float]] = {name: [] for name in (*self._engines, BARE)}
        self._losses: dict[str, float] = {}

    def _engine(self, kind: Wanted) -> Engine:
        algorithm = engine_workloads.fedavg()
        choice = choose(kind, self._model, algorithm, self._users, Computing())
        return Engine(self._model, algorithm, self._users, computing=choice.computing)

    def enter(self, peer: Peer) -> None:
        """Let a peer take part."""
        self._peers[peer.name], self._spent[peer.name] = peer, []

    def round(self, number: int) -> None:
        """Train everyone on a cohort, in turns. Raises PeerError when a peer does other work."""
        cohort = self._cohorts[number]
        self._spent[BARE].append(self._bare_seconds(cohort))
        for name, engine in self._engines.items():
            self._spent[name].append(cpu_s_of(partial(engine.run_round, number + 1, cohort)))
        expected = engine_workloads.steps_of(self._users, cohort)
        for name, peer in self._peers.items():
            seconds, steps = peer.round()
            self._spent[name].append(seconds)
            if steps != expected:
                raise PeerError(f"{name} took {steps} local steps in round {number}, and {expected} are right")
        if number == 0:
            self._losses = {name: self._loss(engine.state["params"]) for name, engine in self._engines.items()}
            self._losses |= {name: peer.loss() for name, peer in self._peers.items()}
            self._check_losses()

    def _loss(self, params: Float32) -> float:
        probe = Population(
            ("probe",), {name: array[:PROBE] for name, array in self._users.fields.items()}, np.array([0, PROBE])
        )
        return float(evaluate(self._model, params, probe)["loss"][0])

    def _check_losses(self) -> None:
        before = self._loss(self._model.initial)
        falls = {name: before - loss for name, loss in self._losses.items()}
        fall_of_engine = falls[next(iter(self._engines))]
        for name, fall in falls.items():
            if not abs(fall - fall_of_engine) <= TOLERANCE * abs(fall_of_engine):
                raise PeerError(
                    f"{name} changed the loss from {before:.4f} to {self._losses[name]:.4f} in its first round, "
                    f"Muster to {before - fall_of_engine:.4f}: they did not do the same work"
                )

    def results(self, workload: str) -> Iterator[dict[str, Any]]:
        """The results. The first round does not count."""
        seconds = {name: statistics.median(spent[1:]) for name, spent in self._spent.items()}
        for name, own in seconds.items():
            yield {
                "workload": workload,
                "by": name,
                "version": self._peers[name].version if name in self._peers else "",
                "cpu_s_per_round": own,
                "to_bare": own / seconds[BARE],
                "muster_is_faster": own / seconds[_label(OURS)],
                "loss": self._losses.get(name),
            }


def _label(engine: str) -> str:
    return f"muster, {engine}"


def _write(model: Model, users: Population, cohorts: Sequence[Sequence[int]], folder: Path) -> None:
    """Write what peers read: see benchmarks/peers/turns.py."""
    settings = {
        "model": model.spec.name,
        "classes": engine_workloads.CLASSES,
        "batch_size": engine_workloads.BATCH,
        "client_lr": engine_workloads.CLIENT_LR,
        "cohorts": cohorts,
    }
    (folder / "workload.json").write_bytes(msgspec.json.encode(settings))
    for name, array in {"images": users.fields["x"], "labels": users.fields["y"], "starts": users.starts}.items():
        np.save(folder / f"{name}.npy", array)
    tensors = model.tensors(torch.from_numpy(model.initial))
    weights: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(folder / "weights.npz", **weights)


# Rounds of the engine against bare torch steps, in one run.


def run(options: EngineOptions, say: Say) -> dict[str, Any]:
    """Seconds of one round of every workload, and of the same steps with nothing around them.

    first_round_s: with what is done once, such as recording. cores_seconds_per_round: of the same rounds on all cores
    of the machine, beside a GPU. scaling: of processes, on a CPU. With peers see `compare`. Raises PeerError, and
    EngineError for peers on a GPU and where there is none.
    """
    if options.peers:
        if options.device != "cpu":
            raise EngineError(f"peers are compared by CPU time: take --device cpu, not {options.device}")
        return compare(options.rounds, say)
    torch.set_num_threads(1)
    device = compute_device(options.device)
    on_cpu = device.type == "cpu"
    workloads = dict(_measured(options, device, say))
    if on_cpu:
        say("processes")
    return {
        "engine": options.engine,
        "device": options.device,
        "gpu": None if on_cpu else torch.cuda.get_device_name(device),
        "clock": "CPU seconds" if on_cpu else "wall seconds",
        "scaling": scaling(options.engine, options.rounds) if on_cpu else None,
        "workloads": workloads,
    }


def _measured(options: EngineOptions, device: torch.device, say: Say) -> Iterator[tuple[str, dict[str, Any]]]:
    on_cpu = device.type == "cpu"
    for name, workload in (
        engine_workloads.WORKLOADS if on_cpu else engine_workloads.WORKLOADS | engine_workloads.grown()
    ).items():
        say(name)
        figures = _measure(workload, options.engine, device, options.rounds)
        if not on_cpu and name in engine_workloads.WORKLOADS:
            say(f"{name} on all cores")
            cores_s = seconds_on_cores(name, options.rounds)
            figures["cores_seconds_per_round"] = cores_s
            figures["faster_than_cores"] = cores_s / figures["seconds_per_round"]
        yield name, figures


def _measure(workload: engine_workloads.Workload, kind: Wanted, device: torch.device, rounds: int) -> dict[str, Any]:
    model, users, algorithm = workload.model(), workload.population(), engine_workloads.fedavg()
    ours, reference = [], []
    with engine_workloads.bare_seconds(model, users, device) as seconds_of_bare:
        keep_freed_memory()
        choice = choose(kind, model, algorithm, users, Computing(str(device)))
        engine = Engine(model, algorithm, users, computing=choice.computing)
        for number in range(rounds + 1):
            cohort = users.sample(workload.cohort, 0, number)
            start = engine_workloads.clock(device)
            engine.run_round(number, cohort)
            engine_workloads.wait(device)
            ours.append(engine_workloads.clock(device) - start)
            few = cohort[: engine_workloads.BARE_CLIENTS]
            reference.append(
                seconds_of_bare(few) * engine_workloads.steps_of(users, cohort) / engine_workloads.steps_of(users, few)
            )
    # The first round warms caches and allocators.
    seconds, yardstick = statistics.median(ours[1:]), statistics.median(reference[1:])
    return {
        "engine": choice.computing.engine,
        "engine_reason": choice.reason,
        "seconds_per_round": seconds,
        "first_round_s": ours[0],
        "bare_seconds": yardstick,
        "ratio_to_bare": seconds / yardstick,
        "cores_seconds_per_round": None,
        "faster_than_cores": None,
    }
