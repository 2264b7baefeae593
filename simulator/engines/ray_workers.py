"""Workers on a Ray cluster, which train the blocks of a cohort: no result depends on how many there are, or on deaths.

A worker is an actor with one thread. Model, algorithm and examples are stored once for each machine, and what clients
receive once for each machine and round. Orders carry what the clients of a block keep, and answers bring that back with
the sums of the block. So nothing is lost with a worker: another one trains the block from the same vectors.
"""

from __future__ import annotations

import functools
import importlib
import platform
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError
from torch import Tensor

from export.errors import reason
from export.model import Model
from fedcore.algorithms.algorithm import Algorithm
from fedcore.params import Float32
from fedcore.plan import in_turn
from simulator.engines.computing import Computing
from simulator.engines.memory import ClientStates, keep_freed_memory
from simulator.engines.processes import Blocks, Failure, in_order
from simulator.engines.sums import Client, RoundSums, layouts_of
from simulator.errors import EngineError, ProcessDied
from simulator.population import Population

# So many workers may die of a block, or before they are ready, in a round.
RETRIES = 3
# Some worker is ready within so many seconds, or the cluster has no room.
READY_S = 300.0
LOST = (RayActorError, ObjectLostError, OutOfMemoryError)
"""What Ray raises when a worker is no more, or its answer, or its machine."""
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """What workers need to train clients, the same in all rounds."""

    model: Model
    algorithm: Algorithm
    population: Population
    computing: Computing


@dataclass(frozen=True, slots=True)
class _Order:
    """An order to train the clients of a block in a round. kept: what they keep between rounds, (K, …) by name."""

    number: int
    clients: Sequence[Client]
    kept: Mapping[str, Float32]


@dataclass(frozen=True, slots=True)
class _Trained:
    """A block that was trained: its sums (S,), and what its clients keep from now on."""

    sums: Float64
    kept: Mapping[str, Float32]


class _Worker:
    """An actor of one CPU, or of one with one GPU. What goes wrong in its methods is their result."""

    def prepare(self, versions: Mapping[str, str], work: Sequence[ray.ObjectRef[Work]]) -> Failure | None:
        """Load the work, the one item, after a look at the versions here."""
        keep_freed_memory()
        torch.set_num_threads(1)
        # Ray stores arrays for all processes of a machine to read, and nobody writes to examples.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            _check_versions(versions)
            mine = _loaded(work[0])
            self._kept = ClientStates({}, {})
            self._trainer = mine.computing.hosted_trainer(mine.model, mine.algorithm, mine.population, self._kept)
            self._layouts = layouts_of(mine.model, mine.algorithm)
        except Exception as error:  # whatever the user's own code raises
            return Failure.of(error)
        return None

    def train(self, order: _Order, received: Mapping[str, Float32]) -> _Trained | Failure:
        """Train the clients of a block. received: what all clients receive."""
        members = [client.index for client in order.clients]
        try:
            layout = in_turn(self._layouts, order.number)
            sums = RoundSums(layout, torch.empty(layout.size, dtype=torch.float64))
            self._kept.hold(members, _tensors(order.kept))
            self._trainer.train(order.number, _tensors(received), order.clients, sums)
        except Exception as error:  # whatever the user's own code raises
            return Failure.of(error)
        return _Trained(sums.vector.numpy(), _arrays(self._kept.gather(members)))


class RayWorkers:
    """Workers of the cluster that this process is connected to. They start when they are needed, and end with this.

    kept: what all clients keep between rounds; it is moved.
    """

    def __init__(self, work: Work, kept: ClientStates) -> None:
        self._count, self._kept = work.computing.processes, kept
        self._gpus = 1 if work.computing.on_gpu else 0
        self._layouts = layouts_of(work.model, work.algorithm)
        self._versions = _versions(work.computing)
        _send_own_code(work)
        self._work = ray.put(work)
        self._idle: deque[Any] = deque()
        # Workers by what they were asked, with the block that they train; None while they get ready.
        self._busy: dict[ray.ObjectRef[Any], tuple[Any, int | None]] = {}

    def train(self, number: int, received: Mapping[str, Tensor], blocks: Blocks) -> RoundSums:
        """Train blocks, as many at a time as there are workers: see CohortTrainer."""
        layout = in_turn(self._layouts, number)
        sums = RoundSums(layout, torch.empty(layout.size, dtype=torch.float64))
        try:
            while len(self._idle) + len(self._busy) < min(self._count, len(blocks)):
                self._start()
            start = functools.partial(self._order, number, ray.put(_arrays(received)), blocks)
            ended = functools.partial(self._ended, blocks, Counter[int | None]())
            for part in in_order(len(blocks), self._count, self._idle, start, ended):
                sums.vector += torch.tensor(part)
        except BaseException:
            self._end()  # some may still be at work on this round
            raise
        return sums

    def _ended(self, blocks: Blocks, deaths: Counter[int | None]) -> Iterator[tuple[int, Float64 | None]]:
        """The block that ended first, with its sums; None for one whose worker died."""
        answered = self._wait()
        worker, block = self._busy.pop(answered)
        try:
            trained = _answer(answered)
        except LOST as error:
            deaths[block] += 1
            _check_deaths(deaths[block], block, error)
            ray.kill(worker)
            self._start()
            if block is not None:
                yield block, None
            return
        self._idle.append(worker)
        if block is not None and trained is not None:
            self._keep(blocks[block], trained)
            yield block, trained.sums

    def _start(self) -> None:
        worker: Any = ray.remote(num_cpus=1, num_gpus=self._gpus)(_Worker).remote()
        self._busy[worker.prepare.remote(self._versions, [self._work])] = worker, None

    def _order(self, number: int, received: ray.ObjectRef[Any], blocks: Blocks, block: int) -> None:
        clients, worker = list(blocks[block]), self._idle.popleft()
        order = _Order(number, clients, _arrays(self._kept.gather([client.index for client in clients])))
        self._busy[worker.train.remote(order, received)] = worker, block

    def _wait(self) -> ray.ObjectRef[Any]:
        """The question that a worker answered first. Raises EngineError when none gets ready."""
        all_start = all(block is None for _, block in self._busy.values())
        answered, _ = ray.wait(list(self._busy), timeout=READY_S if all_start else None)
        if not answered:
            raise EngineError(
                f"no worker of the Ray cluster was ready within {READY_S:.0f} s; do other jobs hold its CPUs or GPUs "
                "(`ray status`)?"
            )
        return answered[0]

    def _keep(self, clients: Sequence[Client], trained: _Trained) -> None:
        everyone = torch.ones(len(clients), dtype=torch.bool)
        self._kept.scatter([client.index for client in clients], _tensors(trained.kept), everyone)

    def _end(self) -> None:
        """End all workers, whatever they work on."""
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            ray.kill(worker)
        self._idle.clear()
        self._busy.clear()


def _answer(answered: ray.ObjectRef[Any]) -> _Trained | None:
    """A block that was trained; None of a worker that is ready.

    Raises EngineError or ExportError when the worker could not do it, and one of LOST when it died.
    """
    try:
        answer: _Trained | Failure | None = ray.get(answered)
    except LOST:
        raise
    except RayError as error:
        raise EngineError(f"a worker of the Ray cluster failed: {reason(error)}") from error
    if isinstance(answer, Failure):
        raise answer.raised()
    return answer


def _check_deaths(count: int, block: int | None, error: RayError) -> None:
    """Raise ProcessDied when too many workers died of the same block, or before they were ready (None)."""
    if count > RETRIES:
        how, why = (
            ("before they were ready", "every machine needs Muster with its extra ray, and memory for the examples")
            if block is None
            else ("of one block", "often the memory of a machine is full, which fewer --processes need less of")
        )
        last = str(error).splitlines()[-1]
        raise ProcessDied(f"{count} workers of the Ray cluster died {how}; {why}. The last one: {last}") from error


def _send_own_code(work: Work) -> None:
    """Let the code of model and algorithm travel to the workers, unless it is of an installed package.

    What such code imports in its turn must be there already.
    """
    installed = {*metadata.packages_distributions(), *sys.stdlib_module_names, "__main__"}
    for name in {module.partition(".")[0] for module in _modules_of(work.model, work.algorithm)} - installed:
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]


def _modules_of(model: Model, algorithm: Algorithm) -> set[str]:
    """The names of the modules that the code of a model and an algorithm is in."""
    spec = model.spec
    code = [spec.make, spec.loss, *spec.metrics.values(), *map(type, model.module.modules()), type(algorithm)]
    return {function.__module__ for function in code if hasattr(function, "__module__")}


def _loaded(work: ray.ObjectRef[Work]) -> Work:
    try:
        return ray.get(work)
    except Exception as error:  # whatever the user's own code raises
        raise EngineError(
            f"model and algorithm cannot be loaded on {platform.node()}: {reason(error)}; modules that your own code "
            "imports must be installed on every machine of the Ray cluster"
        ) from error


def _versions(computing: Computing) -> dict[str, str]:
    """The versions of all that computes, by module."""
    names = ["torch", "numpy", *(["onnxruntime"] if computing.graphs is not None else [])]
    return {name: importlib.import_module(name).__version__ for name in names}


def _check_versions(wanted: Mapping[str, str]) -> None:
    """Raise EngineError when this worker would compute with other versions: it might round differently."""
    for name, version in wanted.items():
        here = importlib.import_module(name).__version__
        if here != version:
            raise EngineError(
                f"{platform.node()} has {name} {here}, and the machine that started the training {version}; install "
                "the same version on every machine of the Ray cluster"
            )


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Float32]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _tensors(arrays: Mapping[str, Float32]) -> dict[str, Tensor]:
    """Copies, which begin where tensors of this process do: Ray's own arrays may lie elsewhere."""
    return {name: torch.tensor(array) for name, array in arrays.items()}
