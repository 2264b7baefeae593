"""Rounds of the engine on all cores of the machine, by the wall clock: what a GPU of the machine is held against."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from benchmarks.engine_workloads import Workload, fedavg
from fedcore.decoding import decoder
from simulator.engine import Engine
from simulator.engines.computing import Computing
from simulator.engines.memory import keep_freed_memory
from simulator.engines.workers.processes import usable_cores

_MEASURE = """
import sys
from benchmarks.engine_cores import measure
from benchmarks.engine_workloads import WORKLOADS
print(measure(WORKLOADS[sys.argv[1]], int(sys.argv[2])))
"""
_SECONDS = decoder(float)


def seconds_on_cores(name: str, rounds: int) -> float:
    """Wall seconds of a round of a workload, in a fresh process: one that computes on a GPU can fork none."""
    command = [sys.executable, "-c", _MEASURE, name, str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return _SECONDS.decode(subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True).stdout)


def measure(workload: Workload, rounds: int) -> float:
    """Measure in this process: the median of the rounds after the first, which forks and warms caches."""
    keep_freed_memory()
    model, users = workload.model(), workload.population()
    engine = Engine(model, fedavg(), users, computing=Computing(processes=usable_cores()))
    spent = []
    for number in range(rounds + 1):
        cohort = users.sample(workload.cohort, 0, number)
        start = time.perf_counter()
        engine.run_round(number, cohort)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:])
