"""A federated simulation from start to finish: held-out users, cohorts, rounds, a learning curve."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.model import Model
from export.models import load as load_model
from fedcore.algorithms import create, module_of
from fedcore.algorithms.check import check
from fedcore.decoding import converter
from simulator import datasets
from simulator.diagnose_loss import cause
from simulator.engine import Engine, evaluate
from simulator.errors import Diverged, EngineError
from simulator.population import Population

PERCENTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Settings of a simulation. Held-out users measure the model every `evaluate_every` rounds and after the last."""

    model: str
    dataset: str = "digits"
    data: Path | None = None
    algorithm: str = "fedavg"
    settings: dict[str, Any] = field(default_factory=dict)
    rounds: int = 100
    cohort: int = 10
    held_out: float = datasets.HELD_OUT
    evaluate_every: int = 10
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "cohort", "evaluate_every"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.held_out < 1:
            raise EngineError(f"held_out must lie between 0 and 1, not {self.held_out}")
        if not 0 <= self.seed < 2**63:
            raise EngineError(f"seed must be a whole number from 0 to 2^63 − 1, not {self.seed}")


to_config = converter(SimulationConfig, dec_hook=lambda kind, value: kind(value))
"""A configuration from plain values, such as a TOML file has. Raises msgspec.ValidationError."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The outcome, JSON-ready. `per_user` holds percentiles of held-out users' accuracy (or loss without a metric)."""

    model: str
    dataset: str
    algorithm: str
    settings: dict[str, object]
    rounds: int
    cohort: int
    seed: int
    parameters: int
    train_users: int
    test_users: int
    test_loss: float
    test_accuracy: float | None
    per_user: dict[str, float]
    curve: list[dict[str, float]]
    params_sha256: str


def simulate(
    config: SimulationConfig, on_round: Callable[[int, dict[str, float]], None] = lambda number, metrics: None
) -> SimulationResult:
    """Run a simulation; `on_round` is called with every round's number and metrics.

    Raises SimulatorError, ExportError or AlgorithmError, naming what is wrong, before any work.
    """
    algorithm = create(config.algorithm, config.settings, [module_of(config.algorithm)])
    check(algorithm)
    dataset = datasets.describe(config.dataset)
    model = Model(load_model(config.model, dataset.shape, dataset.classes), config.seed)
    train, test = datasets.load(config.dataset, config.data).split(config.held_out, config.seed)
    engine = Engine(model, algorithm, train, seed=config.seed, device=config.device)
    curve = []
    for number in range(1, config.rounds + 1):
        result = engine.run_round(number, train.sample(config.cohort, config.seed, number))
        point: dict[str, float] = {"round": number} | result.metrics | {"excluded": result.excluded}
        if number % config.evaluate_every == 0 or number == config.rounds:
            per_user = evaluate(model, engine.state["params"], test, device=config.device)
            _refuse_non_finite(model, engine, test, per_user["loss"], number)
            point |= {f"test.{name}": overall(values, test) for name, values in per_user.items()}
            curve.append(point)
        on_round(number, point)
    ranked = per_user.get("accuracy", per_user["loss"])
    return SimulationResult(
        model=config.model,
        dataset=config.dataset,
        algorithm=algorithm.name,
        settings=asdict(algorithm),  # type: ignore[call-overload]
        rounds=config.rounds,
        cohort=config.cohort,
        seed=config.seed,
        parameters=model.schema.size,
        train_users=len(train),
        test_users=len(test),
        test_loss=overall(per_user["loss"], test),
        test_accuracy=overall(per_user["accuracy"], test) if "accuracy" in per_user else None,
        per_user={f"p{percent}": float(np.percentile(ranked, percent)) for percent in PERCENTILES},
        curve=curve,
        params_sha256=hashlib.sha256(engine.state["params"].tobytes()).hexdigest(),
    )


def _refuse_non_finite(model: Model, engine: Engine, test: Population, loss: NDArray[np.float64], number: int) -> None:
    bad = np.flatnonzero(~np.isfinite(loss)).tolist()
    if bad:
        why = cause(model, engine.state["params"], test, bad, number)
        raise Diverged(f"round {number}: the loss of {len(bad)} held-out users is not finite: {why}")


def overall(per_user: NDArray[np.float64], population: Population) -> float:
    """The per-example mean of a per-user mean."""
    return float(np.average(per_user, weights=population.sizes))
