"""The keystone for every algorithm: the model of a fleet over HTTP against that of the engine, which must be the same.

All devices take part in every round. The engine then replays the rounds, with the slots that the coordinator drew.
Where the two differ by more than round-off, and in secure rounds, they are held to the training's own sensitivity.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.options import KeystoneOptions
from benchmarks.sensitivity import sensitivity
from coordinator.rules.task_settings import PHASES_AFTER_TRAINING
from coordinator.store.tasks import Secagg, TaskSettings
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import ALGORITHMS, create, module_of
from fedcore.algorithms.algorithm import Algorithm, trips_of
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.rehearsal import moves_by_participation
from fedcore.report import ReportLayout
from fedcore.signing import SigningKey
from muster.local.fleet import local_fleet
from muster.local.server import LocalCoordinator, local_coordinator
from muster.output import Say
from simulator import datasets
from simulator.course import overall
from simulator.engine import Engine, evaluate
from simulator.engines.computing import Computing
from simulator.engines.graphs import Exported, graphs_of
from simulator.fleet.fork_servers import HERE, ForkServers, fork_servers
from simulator.population import Population
from simulator.proofs.fleet_against_engine import counted_cohort, rounding_error, worst_difference

# Shards hold 23 or 24 digits, so that the last batch of 5 is a masked one.
BATCH_SIZE = 5
# The bound of float32 round-off in the relative distance of two models, as in the keystone test.
TOLERANCE = 1e-5
# As many times as far as the engine's own models are apart under other rounding, which is the worst of a few draws.
OWN_TIMES = 5
# The largest distance that agrees, however sensitive training is: a model that has nothing to do with it is 1 away.
MOST = 0.1
PHASE_S, TRAINING_S = 60.0, 300.0


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm on one model. agreement: the relative distance of the two models, the worst of all rounds and of
    both engines, `torch` and `graphs`.

    accuracy: on users whom training never saw. sensitivity: as far as the engine's own models are apart under other
    rounding; None where it is not needed, as the two models are within the tolerance.
    """

    model: str
    algorithm: str
    rounds: int
    accuracy: float
    agreement: float
    sensitivity: float | None
    agrees: bool
    seconds: float


class Keystone(msgspec.Struct, frozen=True, kw_only=True):
    """Every algorithm on every model. sound: whether all agree within the tolerance, or OWN_TIMES the sensitivity."""

    dataset: str
    devices: int
    secure: bool
    tolerance: float
    worst: float
    sound: bool
    agreements: list[Agreement]


def run(options: KeystoneOptions, say: Say) -> Keystone:
    """Run a fleet for each algorithm and model, one after the other. Raises what export or a fleet raises."""
    names = options.algorithms or list(_trained())
    modules = ",".join(filter(None, map(module_of, names)))
    users, unseen = datasets.users(options.dataset, options.data, options.devices)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-keystone-")))
        local = stack.enter_context(local_coordinator(folder, secure=options.secagg, algorithms=modules))
        servers = stack.enter_context(fork_servers({HERE: ["onnxruntime"]}))
        key = SigningKey.new(folder / "release.pem")
        runs = _Runs(options, folder, local, servers, users, unseen, key)
        agreements = []
        for model in options.models or ["digits_cnn", "mlp"]:
            for name in names:
                say(f"{name} on {model}")
                agreements.append(runs.agreement(model, name))
                say(f"{name} on {model}: {agreements[-1].agreement:.1e}", 1)
    return Keystone(
        dataset=options.dataset,
        devices=options.devices,
        secure=options.secagg,
        tolerance=TOLERANCE,
        worst=max(each.agreement for each in agreements),
        sound=all(each.agrees for each in agreements),
        agreements=agreements,
    )


def _trained() -> Iterator[str]:
    """The algorithms by which devices train."""
    return (name for name, one in ALGORITHMS.items() if one.family != EVALUATION)


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
    unseen: Population
    key: SigningKey

    def agreement(self, model_name: str, name: str) -> Agreement:
        """Train on the fleet, replay in the engine."""
        started = time.monotonic()
        algorithm = _algorithm(name)
        model = Model(load(model_name, self.users.shape, self.users.classes), self.options.seed)
        population = f"{model_name}-{algorithm.name}"
        bundle = export_bundle(model, algorithm, self.folder / f"plan-{population}", model_name)
        settings = self._settings(population, algorithm)
        task = self.local.create_task(bundle, settings, self.key).id
        fleet = local_fleet(self.local, settings, self.users, self.key, self.folder / "devices")
        clients = fleet.run(servers=self.servers).clients
        numbers = range(1, settings.rounds + 1)
        cohorts = [counted_cohort(self.local.store, task, number, clients) for number in numbers]
        models = [self.local.store.checkpoint(task, number)["params"] for number in numbers]

        def engine(algorithm: Algorithm, graphs: Exported | None = None) -> Engine:
            computing = Computing(graphs=graphs)
            return Engine(model, algorithm, self.users, seed=self.options.seed, computing=computing)

        graphs = [] if bundle.plan.kept else [graphs_of(bundle.plan, bundle.read)]  # which keep nothing
        engines = [engine(algorithm, one) for one in (None, *graphs)]
        difference, own = max(worst_difference(fresh, self.users, cohorts, models) for fresh in engines), None
        if difference >= TOLERANCE:
            errors = [self._error(settings.secagg, trip.report) for trip in bundle.plan.trips]
            own = sensitivity(engine, algorithm, self.users, cohorts, errors)
        return Agreement(
            model=model_name,
            algorithm=name,
            rounds=settings.rounds,
            accuracy=overall(evaluate(model, models[-1], self.unseen)["accuracy"], self.unseen),
            agreement=difference,
            sensitivity=own,
            agrees=difference < max(TOLERANCE, min(OWN_TIMES * (own or 0.0), MOST)),
            seconds=time.monotonic() - started,
        )

    def _settings(self, population: str, algorithm: Algorithm) -> TaskSettings:
        secagg = Secagg(clip_norm=self.options.clip_norm, max_examples=int(self.users.sizes.max()), phase_s=PHASE_S)
        return TaskSettings(
            population=population,
            goal=self.options.devices,
            rounds=self.options.rounds * len(trips_of(algorithm)),
            clients=len(self.users) if moves_by_participation(algorithm) else None,
            over_selection=1.0,
            seed=self.options.seed,
            reporting_deadline_s=TRAINING_S + PHASES_AFTER_TRAINING * PHASE_S,
            secagg=secagg if self.options.secagg else None,
        )

    def _error(self, secagg: Secagg | None, layout: ReportLayout) -> float:
        """The deviation of a value of the mean over all devices, by the rounding of secure rounds."""
        values = sum(segment.size for segment in layout.means)
        return rounding_error(secagg, layout, self.users.sizes.tolist()) / math.sqrt(values) if secagg else 0.0
