"""The computing of an engine: its device, torch or exported graphs, and trainers on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from export.model import Model
from fedcore.algorithms.algorithm import Algorithm
from fedcore.validation import decoder
from simulator.engines.memory import ClientStates
from simulator.engines.processes import compute_apart
from simulator.engines.recorded.program import CudaGraphs, Programs
from simulator.engines.sums import Client, ClientTrainer, RoundSums, blocks, dealt
from simulator.engines.vectorised import VectorisedTrainer, clients_at_once
from simulator.errors import EngineError
from simulator.population import Population

if TYPE_CHECKING:
    from simulator.engines.graphs import Exported


class OnGpu:
    """Trains on a compute device with vectors from the host."""

    def __init__(self, trainer: ClientTrainer, device: torch.device) -> None:
        self._trainer, self._device = trainer, device

    def train(self, number: int, broadcast: Mapping[str, Tensor], clients: Sequence[Client], sums: RoundSums) -> None:
        """Run a trip for every client: see ClientTrainer."""
        there = RoundSums(sums.layout, torch.empty_like(sums.vector, device=self._device))
        received = {name: vector.to(self._device) for name, vector in broadcast.items()}
        self._trainer.train(number, received, clients, there)
        sums.vector.copy_(there.vector)


EngineName = Literal["graphs", "torch"]

# The name of all GPUs of a machine together.
EVERY_GPU = "cuda:all"

_COUNT = decoder(int)


@dataclass(frozen=True, slots=True)
class Computing:
    """The way of training clients: torch on its `device`, several together, or graphs on the CPU, one by one.

    graphs: from `simulator.engines.graphs.export_graphs`; without them torch computes. processes: the number of
    training processes, with one thread each; on "cuda" each has its own GPU. at_once: the number of clients that torch
    vectorises together; chosen by model and device if not given. on_ray: whether the processes are workers of the Ray
    cluster that this process is connected to (simulator/engines/processes.py) instead of forked.
    """

    device: str = "cpu"
    graphs: Exported | None = None
    processes: int = 1
    at_once: int | None = None
    on_ray: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs train."""
        return self.device != "cpu"

    @property
    def home(self) -> str:
        """This process's device. It leaves GPUs to forked processes, if any, as it cannot fork after using one."""
        return "cpu" if self.processes > 1 or self.on_ray else self.device

    @property
    def forks(self) -> bool:
        """Whether processes are forked to train."""
        return self.processes > 1 and not self.on_ray

    @property
    def engine(self) -> EngineName:
        """The engine's name."""
        return "torch" if self.graphs is None else "graphs"

    def together(self, model: Model, steps: int | None = None) -> int:
        """The number of clients of a model that train together. steps: the most of a client, if known."""
        if self.graphs is not None:
            return 1
        return self.at_once or clients_at_once(model, torch.device(self.device), steps)

    def parts(self, model: Model, clients: Sequence[Client]) -> list[Sequence[Client]]:
        """A cohort, longest first, in the parts that are trained and summed separately."""
        return dealt(clients, self.processes) if self.on_gpu else blocks(clients, self.together(model))

    def of_process(self, number: int) -> Computing:
        """The computing of one of the forked processes."""
        return replace(self, device=f"cuda:{number}" if self.on_gpu else self.device, processes=1)

    def trainer(
        self, model: Model, algorithm: Algorithm, population: Population, client_states: ClientStates
    ) -> ClientTrainer:
        """The trainer of a population's clients. client_states: what they keep between rounds.

        Raises EngineError when this machine or installation cannot compute so.
        """
        if self.graphs is None:
            device = compute_device(self.device)
            programs = Programs(device, CudaGraphs(device) if device.type == "cuda" else None)
            at_once = functools.partial(self.together, model)
            return VectorisedTrainer(
                model.on(device), algorithm, population, client_states, programs=programs, at_once=at_once
            )
        from simulator.engines.graphs import GraphsTrainer  # needs ONNX Runtime, which torch does not

        return GraphsTrainer(self.graphs, population)

    def hosted_trainer(
        self, model: Model, algorithm: Algorithm, population: Population, client_states: ClientStates
    ) -> ClientTrainer:
        """The same trainer, for a process whose vectors are on the host."""
        trainer = self.trainer(model, algorithm, population, client_states)
        return OnGpu(trainer, compute_device(self.device)) if self.on_gpu else trainer


def compute_device(name: str) -> torch.device:
    """The torch device called `name`. Raises EngineError when this installation cannot compute there."""
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise EngineError(f"cannot compute on {name!r} here: {str(error).splitlines()[0]}") from error
    return device


def gpus() -> int:
    """The number of GPUs that torch sees here. Raises EngineError if there is none."""
    # Counted in another process, as a process that has looked at GPUs cannot fork one that trains on a GPU.
    count = compute_apart(torch.cuda.device_count, _COUNT)
    if not count:
        raise EngineError(f"torch sees no GPU here, so nothing computes on {EVERY_GPU!r}; take --device=cpu")
    return count
