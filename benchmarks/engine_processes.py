"""Processes of the engine, by the wall clock: two against one, with the memory that each takes, and one for each core.

Each is measured in a fresh process: what this one holds would count as memory of those that it forks, and one that
computes on a GPU can fork none.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from benchmarks.engine_workloads import WORKLOADS, Workload, fedavg
from benchmarks.usage import Usage, family_of, in_turns
from simulator.engine import Engine
from simulator.engines import Wanted
from simulator.engines.choice import choose
from simulator.engines.computing import Computing
from simulator.engines.memory import keep_freed_memory
from simulator.engines.workers.processes import usable_cores
from simulator.population import Population

# W1 with fewer clients: examples are not weighed, since processes share them.
FEW = msgspec.structs.replace(WORKLOADS["W1"], clients=200)
TARGETS = {"two_processes_faster_by": 1.9, "peak_mb_besides_examples": 700.0}


def scaling(kind: Wanted, rounds: int) -> dict[str, Any]:
    """What `measure_scaling` gives, in a fresh process."""
    found: dict[str, Any] = _fresh(f"measure_scaling({kind!r}, {rounds})")
    return found


def seconds_on_cores(name: str, rounds: int) -> float:
    """What `measure_cores` gives for a workload, in a fresh process."""
    return float(_fresh(f"measure_cores(WORKLOADS[{name!r}], {rounds})"))


def _fresh(expression: str) -> Any:
    code = f"import json; from benchmarks.engine_processes import *; print(json.dumps({expression}))"
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
        "targets": TARGETS,
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
