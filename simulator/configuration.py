"""The configuration of a simulation, federated or of a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rules.task_settings import Secagg
from fedcore.codecs.compression import Compression
from fedcore.names import offered
from fedcore.schedule import ServerSchedule
from fedcore.validation import build, check, checked
from simulator import datasets
from simulator.baselines import BASELINES, METHODS
from simulator.baselines.linear import LOSSES
from simulator.engines.choice import Wanted
from simulator.errors import EngineError
from simulator.private_training import PrivateTraining


@checked(EngineError)
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Settings of a simulation. Held-out users measure the model every `evaluate_every` rounds and after the last.

    baseline: what to run instead of federated training, one of BASELINES; the linear ones train a model "ridge" or
    "logistic", have settings of their own and no algorithm.
    partition: how examples are dealt to so many `clients` (simulator/datasets/__init__.py: load).
    target_accuracy, patience: when to end before all rounds ran: at an accuracy of the held-out users, or so many
    rounds after their lowest loss (`Limits`).
    cohort: users of round 1; `schedule` says how it grows, and how the server learning rate changes. same_cohort:
    whether the second of two trips has the users of the first.
    privacy: the noise on the sums of rounds, and what they may spend (simulator/private_training.py).
    engine: what trains the clients; "auto" takes torch, or graphs of a model that torch cannot run. processes: how
    many train; by default one for each core that may be used, and one on a GPU. device: "cpu", "cuda", "cuda:1" and the
    like, or "cuda:all", a process for each GPU. at_once: how many clients torch trains together, by default what suits
    model and device; another number rounds otherwise. ray: the Ray cluster whose workers train, "auto", "local" or
    HOST:PORT (simulator/engines/workers/ray_cluster.py); by default one for each of its CPUs, or GPUs.
    compress: the compression of reports, such as "rotation,subsample=0.25" (fedcore/codecs/compression.py).
    plan: the folder of a bundle whose graphs train, from its initial state; model, algorithm, settings and compression
    are then its own, as `completed_by_plan` gives them (simulator/planned.py).
    secagg: how reports are masked, as in a task; None sums them in clear (simulator/masked_sums.py).
    """

    model: str
    dataset: str = "digits"
    data: Path | None = None
    partition: str | None = None
    clients: int | None = None
    algorithm: str = "fedavg"
    baseline: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    rounds: int = 100
    cohort: int = 10
    held_out: float = datasets.HELD_OUT
    evaluate_every: int = 10
    target_accuracy: float | None = None
    patience: int | None = None
    engine: Wanted = "auto"
    device: str = "cpu"
    processes: int | None = None
    at_once: int | None = None
    ray: str | None = None
    seed: int = 0
    schedule: ServerSchedule = field(default_factory=ServerSchedule)
    same_cohort: bool = False
    compress: str = ""
    secagg: Secagg | None = None
    privacy: PrivateTraining = field(default_factory=PrivateTraining)
    plan: Path | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # values may be NumPy's, as a notebook computes them
            object.__setattr__(self, name, without_numpy(getattr(self, name)))
        check(self)
        for name in ("rounds", "clients", "cohort", "evaluate_every", "patience", "processes", "at_once"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.held_out < 1:
            raise EngineError(f"held_out must lie between 0 and 1, not {self.held_out}")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise EngineError(f"target_accuracy must lie above 0 and at most at 1, not {self.target_accuracy}")
        if not 0 <= self.seed < 2**63:
            raise EngineError(f"seed must be a whole number from 0 to 2^63 − 1, not {self.seed}")
        self._check_compression()
        self._check_plan()
        if self.baseline is not None:
            self._check_baseline()

    def _check_plan(self) -> None:
        if self.plan is not None and (self.baseline is not None or self.engine == "torch"):
            other = f"the engine {self.engine}" if self.baseline is None else f"the baseline {self.baseline}"
            raise EngineError(f"a plan trains by its own graphs, not by {other}; leave one of them out")

    def _check_compression(self) -> None:
        compression = Compression.parse(self.compress)
        if self.secagg is not None:
            if compression.bits:
                raise EngineError("masked reports are rounded as secagg says: leave bits out of compress")
        elif self.privacy.asked and (compression.bits or any(name != "rotation" for name, _ in compression.steps)):
            raise EngineError("privacy needs a compression that keeps the length of a report: rotation alone, or none")

    def _check_baseline(self) -> None:
        if self.baseline not in BASELINES:
            raise EngineError(f"no baseline is called {self.baseline!r}; {offered(self.baseline, BASELINES)}")
        if self.schedule != ServerSchedule():
            raise EngineError(f"a schedule is for federated training, not for the baseline {self.baseline}")
        if self.privacy.asked:
            raise EngineError(f"privacy is for federated training, not for the baseline {self.baseline}")
        if self.compress or self.secagg is not None:
            raise EngineError(
                f"reports are compressed or masked in federated training, not in the baseline {self.baseline}"
            )
        chosen = self.engine != "auto" or self.processes is not None or self.ray is not None
        if self.baseline != "pooled" and chosen:
            raise EngineError(
                f"engine, processes and ray are for federated training, not for the baseline {self.baseline}"
            )
        if self.baseline in METHODS and self.model not in LOSSES:
            raise EngineError(f"{self.baseline} trains a linear model: {' or '.join(LOSSES)}, not {self.model!r}")


def to_config(values: Mapping[str, Any]) -> SimulationConfig:
    """A configuration from plain values, such as a TOML file has. Raises EngineError naming the option."""
    return build(SimulationConfig, without_numpy(dict(values)))


def without_numpy(value: Any) -> Any:
    """A value with Python's own numbers in place of NumPy's."""
    if isinstance(value, dict):
        return {key: without_numpy(one) for key, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value
