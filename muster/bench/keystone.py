"""The keystone for every algorithm: the model of a fleet over HTTP against that of the engine, which must be the same.

All devices take part in every round. The engine then replays the rounds, with the slots that the coordinator drew.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from coordinator.store.tasks import TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import ALGORITHMS, create, module_of
from fedcore.algorithms.algorithm import Algorithm, keeps_client_state, trips_of
from muster.bench.options import KeystoneOptions
from muster.output import Say
from muster.server import LocalCoordinator, local_coordinator
from simulator import datasets
from simulator.engine import Engine
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.fork_servers import HERE, ForkServers, fork_servers
from simulator.population import Population
from simulator.proofs.fleet_against_engine import counted_cohort, worst_difference

DATASET = "digits"
# Shards hold 23 or 24 digits, so that the last batch of 5 is a masked one.
BATCH_SIZE = 5
# The bound of float32 round-off in the relative distance of two models, as in the keystone test.
TOLERANCE = 1e-5


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm on one model. agreement: the relative distance of the two models, the worst of all rounds."""

    model: str
    algorithm: str
    rounds: int
    agreement: float
    agrees: bool
    seconds: float


class Keystone(msgspec.Struct, frozen=True, kw_only=True):
    """Every algorithm on every model. sound: whether all agree within the tolerance."""

    devices: int
    tolerance: float
    worst: float
    sound: bool
    agreements: list[Agreement]


def run(options: KeystoneOptions, say: Say) -> Keystone:
    """Run a fleet for each algorithm and model, one after the other. Raises what export or a fleet raises."""
    names = options.algorithms or list(_stateless())
    modules = ",".join(filter(None, map(module_of, names)))
    users, _ = datasets.users(DATASET, None, options.devices)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-keystone-")))
        local = stack.enter_context(local_coordinator(folder, algorithms=modules))
        servers = stack.enter_context(fork_servers({HERE: ["onnxruntime"]}))
        runs = _Runs(options, folder, local, servers, users)
        found = []
        for model in options.models or ["digits_cnn", "mlp"]:
            for name in names:
                say(f"{name} on {model}")
                found.append(runs.agreement(model, name))
                say(f"{name} on {model}: {found[-1].agreement:.1e}", 1)
    return Keystone(
        devices=options.devices,
        tolerance=TOLERANCE,
        worst=max(one.agreement for one in found),
        sound=all(one.agrees for one in found),
        agreements=found,
    )


def _stateless() -> Iterator[str]:
    """The algorithms that devices run."""
    return (name for name in ALGORITHMS if not keeps_client_state(create(name)))


def _algorithm(name: str) -> Algorithm:
    """The algorithm with its own settings, but for small batches where it has such."""
    algorithm = create(name, None, [module_of(name)])
    fields = {field.name for field in dataclasses.fields(algorithm)}  # type: ignore[arg-type]
    return create(name, {"batch_size": BATCH_SIZE}, [module_of(name)]) if "batch_size" in fields else algorithm


@dataclasses.dataclass(frozen=True, slots=True)
class _Runs:
    """What all runs share."""

    options: KeystoneOptions
    folder: Path
    local: LocalCoordinator
    servers: ForkServers
    users: Population

    def agreement(self, model_name: str, name: str) -> Agreement:
        """Train on the fleet, replay in the engine."""
        started = time.monotonic()
        dataset, algorithm = datasets.describe(DATASET), _algorithm(name)
        model = Model(load(model_name, dataset.shape, dataset.classes), self.options.seed)
        population = f"{model_name}-{algorithm.name}"
        bundle = export_bundle(model, algorithm, self.folder / f"plan-{population}", model_name)
        rounds = self.options.rounds * len(trips_of(algorithm))
        settings = TaskSettings(
            population=population,
            goal=self.options.devices,
            rounds=rounds,
            over_selection=1.0,
            seed=self.options.seed,
        )
        task = self.local.store.register_task(bundle, settings).id
        config = FleetConfig(
            coordinator=self.local.url,
            population=population,
            folder=self.folder / "devices" / population,
            concurrency=self.options.devices,
            seed=self.options.seed,
        )
        clients = Fleet(config, self.users).run(servers=self.servers).clients
        numbers = range(1, rounds + 1)
        cohorts = [counted_cohort(self.local.store, task, number, clients) for number in numbers]
        models = [self.local.store.checkpoint(task, number)["params"] for number in numbers]
        engine = Engine(model, algorithm, self.users, seed=self.options.seed)
        found = worst_difference(engine, self.users, cohorts, models)
        return Agreement(
            model=model_name,
            algorithm=name,
            rounds=rounds,
            agreement=found,
            agrees=found < TOLERANCE,
            seconds=time.monotonic() - started,
        )
