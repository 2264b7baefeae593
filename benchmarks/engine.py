"""Rounds of the engine against bare torch steps, in one run.

On a CPU times are CPU seconds of one thread, on a GPU wall seconds; the median over the rounds counts. The bare steps
run in a process of their own, as the allocator of this one is told to keep memory. A GPU is also held against all cores
of its machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import engine_workloads
from benchmarks.engine_peers import compare
from benchmarks.engine_processes import scaling, seconds_on_cores
from benchmarks.runner import EngineOptions
from muster.output import Say
from simulator.engine import Engine
from simulator.engines import Wanted
from simulator.engines.choice import choose
from simulator.engines.computing import Computing, compute_device
from simulator.engines.memory import keep_freed_memory
from simulator.errors import EngineError


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
