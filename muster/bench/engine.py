"""Rounds of the engine against bare torch steps, in one run.

On a CPU times are CPU seconds of one thread, on a GPU wall seconds; the median over the rounds counts. The bare steps
run in a process of their own, as the engine tells the allocator of this one to keep memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import torch

from export.model import Model
from fedcore.decoding import decoder
from muster.bench.engine_workloads import WORKLOADS, Workload, bare, clock, fedavg, wait
from muster.bench.options import EngineOptions
from muster.output import Say
from simulator.engine import Engine
from simulator.engines.calibration import Task
from simulator.engines.choice import Wanted, choose
from simulator.engines.computing import Computing
from simulator.engines.forked import Forked
from simulator.population import Population

_COHORT, _SECONDS = decoder(list[int]), decoder(float)


class WorkloadTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one round, and of the same steps with nothing around them. engine: the one that trained, and why."""

    engine: str
    engine_reason: str
    seconds_per_round: float
    bare_seconds: float
    ratio_to_bare: float


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The workloads by name. gpu: its name, where one computed."""

    engine: str
    device: str
    gpu: str | None
    clock: str
    workloads: dict[str, WorkloadTime]


def run(options: EngineOptions, say: Say) -> EngineTimes:
    """Measure every workload."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    found = {}
    for name, workload in WORKLOADS.items():
        say(name)
        found[name] = _measure(workload, options.engine, device, options.rounds)
    on_cpu = device.type == "cpu"
    return EngineTimes(
        engine=options.engine,
        device=options.device,
        gpu=None if on_cpu else torch.cuda.get_device_name(device),
        clock="CPU seconds" if on_cpu else "wall seconds",
        workloads=found,
    )


def _measure(workload: Workload, kind: Wanted, device: torch.device, rounds: int) -> WorkloadTime:
    model, users, algorithm = workload.model(), workload.population(), fedavg()
    ours, reference = [], []
    with _bare_seconds(model, users, device) as bare_seconds:
        choice = choose(kind, Task(model, algorithm, users, rounds * workload.cohort), Computing(str(device)))
        engine = Engine(model, algorithm, users, computing=choice.computing)
        for number in range(rounds + 1):
            cohort = users.sample(workload.cohort, 0, number)
            start = clock(device)
            engine.run_round(number, cohort)
            wait(device)
            ours.append(clock(device) - start)
            reference.append(bare_seconds(cohort))
    # The first round warms caches and allocators.
    seconds, yardstick = statistics.median(ours[1:]), statistics.median(reference[1:])
    return WorkloadTime(
        engine=choice.computing.engine,
        engine_reason=choice.reason,
        seconds_per_round=seconds,
        bare_seconds=yardstick,
        ratio_to_bare=seconds / yardstick,
    )


@contextmanager
def _bare_seconds(model: Model, users: Population, device: torch.device) -> Iterator[Callable[[list[int]], float]]:
    """A function for the seconds of a cohort's bare steps: in a forked process, with a GPU in this one."""
    if device.type != "cpu":
        yield lambda cohort: bare(model, users, cohort, device)
        return

    def main(pipe: Connection) -> None:
        while True:
            cohort = _COHORT.decode(pipe.recv_bytes())
            pipe.send_bytes(msgspec.json.encode(bare(model, users, cohort, device)))

    def seconds(cohort: list[int]) -> float:
        process.send(msgspec.json.encode(cohort))
        return _SECONDS.decode(process.receive())

    process = Forked(main)
    yield seconds
    process.end()
