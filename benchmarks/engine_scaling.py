"""Two processes of the engine against one, by the wall clock, and the memory that each process takes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import msgspec

from benchmarks.engine_workloads import WORKLOADS, Workload, fedavg
from benchmarks.usage import Usage, family_of
from fedcore.decoding import decoder
from simulator.engine import Engine
from simulator.engines import Wanted
from simulator.engines.choice import choose
from simulator.engines.computing import Computing
from simulator.engines.memory import keep_freed_memory

# W1 with fewer clients: examples are not weighed, since processes share them.
FEW = msgspec.structs.replace(WORKLOADS["W1"], clients=200)
_MEASURE = """
import sys
import msgspec
from benchmarks.engine_scaling import measure
print(msgspec.json.encode(measure(sys.argv[1], int(sys.argv[2]))).decode())
"""
TARGETS = {"two_processes_faster_by": 1.9, "peak_mb_besides_examples": 700.0}


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Wall seconds of a round, in turns.

    peak_mb_besides_examples: of the process that took most while two trained, its peak in 2²⁰ bytes less the examples
    of the population, which all processes share.
    """

    one_process_s: float
    two_processes_s: float
    two_processes_faster_by: float
    peak_mb_besides_examples: float
    targets: dict[str, float]


_SCALING = decoder(Scaling)


def scaling(kind: Wanted, rounds: int) -> Scaling:
    """Measure in a fresh process: what this one holds would count as memory of those that it forks."""
    command = [sys.executable, "-c", _MEASURE, kind, str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return _SCALING.decode(subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True).stdout)


def measure(kind: Wanted, rounds: int, workload: Workload = FEW) -> Scaling:
    """Measure in this process."""
    keep_freed_memory()
    model, users, algorithm = workload.model(), workload.population(), fedavg()
    two = choose(kind, model, algorithm, users, Computing(processes=2)).computing
    # Two processes first: with one, this process trains, and grows.
    engines = {count: Engine(model, algorithm, users, computing=replace(two, processes=count)) for count in (2, 1)}
    spent: dict[int, list[float]] = {count: [] for count in engines}
    peak_rss_mb = 0.0
    examples_mb = sum(array.nbytes for array in users.fields.values()) / 2**20
    for number in range(1, rounds + 2):
        cohort = users.sample(workload.cohort, 0, number)
        for count, engine in engines.items():
            start = time.perf_counter()
            engine.run_round(number, cohort)
            spent[count].append(time.perf_counter() - start)
            if number == 1 and count == 2:
                peak_rss_mb = max(Usage.of(pid).peak_rss_mb for pid in family_of(os.getpid()))
    one_s, two_s = (statistics.median(spent[count][1:]) for count in (1, 2))  # the first round forks and warms caches
    return Scaling(
        one_process_s=one_s,
        two_processes_s=two_s,
        two_processes_faster_by=one_s / two_s,
        peak_mb_besides_examples=peak_rss_mb - examples_mb,
        targets=TARGETS,
    )
