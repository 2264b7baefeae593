"""The computing of an engine: on which device, with torch or on exported graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from export.model import Model
from fedcore.algorithms.algorithm import Algorithm
from simulator.client_states import ClientStates
from simulator.engines.clients import ClientTrainer
from simulator.engines.vectorised import VectorisedTrainer, clients_at_once
from simulator.errors import EngineError
from simulator.population import Population

if TYPE_CHECKING:
    from simulator.engines.graphs import Exported

EngineName = Literal["graphs", "torch"]


@dataclass(frozen=True, slots=True)
class Computing:
    """How clients are trained: by torch on its `device`, several together, or on graphs on the CPU, one by one.

    graphs: what `simulator.engines.graphs.export_graphs` gives; without them torch computes. processes: how many train,
    one thread each; only on the CPU more than one. at_once: how many clients torch vectorises together; chosen by model
    and device when not given. on_ray: whether the processes are workers of the Ray cluster that this process is
    connected to (simulator/engines/ray_cluster.py), and not forked from it.
    """

    device: str = "cpu"
    graphs: Exported | None = None
    processes: int = 1
    at_once: int | None = None
    on_ray: bool = False

    @property
    def forks(self) -> bool:
        """Whether processes are forked to train."""
        return self.processes > 1 and not self.on_ray

    @property
    def engine(self) -> EngineName:
        """The engine's name."""
        return "torch" if self.graphs is None else "graphs"

    def together(self, model: Model) -> int:
        """How many clients of a model are trained together."""
        if self.graphs is not None:
            return 1
        return self.at_once or clients_at_once(model, torch.device(self.device))

    def trainer(self, model: Model, algorithm: Algorithm, population: Population, kept: ClientStates) -> ClientTrainer:
        """What trains the clients of a population; `kept` is what they keep between rounds.

        Raises EngineError when this machine or installation cannot compute so.
        """
        if self.graphs is None:
            device, at_once = compute_device(self.device), self.together(model)
            return VectorisedTrainer(model, algorithm, population, kept, device=device, at_once=at_once)
        from simulator.engines.graphs import GraphsTrainer  # noqa: PLC0415  # needs ONNX Runtime, which torch does not

        return GraphsTrainer(self.graphs, population)


def compute_device(name: str) -> torch.device:
    """The torch device called `name`. Raises EngineError when this installation cannot compute there."""
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise EngineError(f"cannot compute on {name!r} here: {str(error).splitlines()[0]}") from error
    return device
