"""A simulation from start to finish: held-out users, cohorts, rounds, a learning curve; federated, or a baseline.

From a configuration to one round:

    SimulationConfig            checks its settings, alone and together
    training_of                 users, model, algorithm, cohorts, what happens to sums, and the engine that trains
    EngineTraining.run_round    draws the cohort
    Engine.run_round            trains it, collects its reports, and takes the server's step
    CompressedReports.collect   the mean report: exact, encoded, or of reports that are rounded or masked one by one
    PrivateSums.mean            the noise, if the rounds are private
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.model import Model, ModelSpec
from export.models import check_name as check_model_name, load as load_model
from export.normalising import Normaliser
from fedcore.algorithms import create, module_of, name_of, settings_of
from fedcore.algorithms.algorithm import Algorithm, check_two_trips
from fedcore.algorithms.check import check
from fedcore.algorithms.facts import for_model
from fedcore.algorithms.local_training import LocalTraining, PartlyLocal
from fedcore.algorithms.settings import parse
from fedcore.batching import HoldOut
from fedcore.compression import Compression
from fedcore.errors import facts_of
from fedcore.params import Float32
from fedcore.plan import ExampleSpec
from fedcore.privacy.accounting import check_private
from simulator import datasets
from simulator.configuration import SUITED, SimulationConfig
from simulator.datasets.bundled import verified
from simulator.datasets.partitions import NATURAL, read_partition
from simulator.engine import CompressedReports, Engine
from simulator.engines import Wanted
from simulator.engines.choice import check_model, choose
from simulator.engines.computing import EVERY_GPU, Computing, gpus
from simulator.engines.memory import one_thread
from simulator.engines.processes import connect, usable_cores
from simulator.engines.sums import layouts_of
from simulator.errors import EngineError
from simulator.linear_methods import METHODS, LinearTraining
from simulator.masked_sums import MaskedSum, secure_task, square_of, warn_of_rounding
from simulator.planned import SimulatedPlan, read_model, with_tokens
from simulator.population import Population
from simulator.private_training import Cohorts, PrivateSums, SimulatedPrivacy, promise_of
from simulator.training import (
    ACCURACY,
    LOSS,
    PER_USER,
    PERCENTILES,
    SERVER,
    USER_MEAN,
    Ending,
    EngineTraining,
    Facts,
    FineTuning,
    Limits,
    LocalOnly,
    Point,
    Training,
    Watch,
    measured,
)

TOGETHER = 64
"""Clients that `training_on` vectorises together: its networks are small, so many at once cost less time."""
OnRound = Callable[[int, Point], None]
"""Called after every round with its number and its point of the course."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Objects in place of what a configuration names. users: their numbers must be finite.

    cohorts: who trains in each round (`Cohorts.given`).
    """

    users: Population | None = None
    model: ModelSpec | None = None
    algorithm: Algorithm | None = None
    cohorts: Sequence[Sequence[int]] = ()

    def named(self, config: SimulationConfig) -> SimulationConfig:
        """The configuration with the names of the objects, for its result. Raises DatasetError for the users."""
        if self.users is not None:
            verified(self.users, "users")
            config = replace(config, dataset="own users")
        if self.model is not None:
            config = replace(config, model=self.model.name)
        if self.algorithm is not None:
            settings = asdict(self.algorithm)  # type: ignore[call-overload]
            config = replace(config, algorithm=name_of(self.algorithm), settings=settings)
        return config


@dataclass(frozen=True, slots=True, repr=False)
class SimulationResult:
    """The outcome, JSON-ready. `per_user` holds percentiles of users' accuracy, and `user_mean` its mean over users.

    Without a metric both are of the loss. Users measure on examples that nobody trained on: held-out users, or with
    own_examples and the baseline `local` every user on some of their own, by a model of their own where there are
    such. rounds: how many ran; `ended_by` says why no more. excluded: reports of clients that rounds left out because
    they were not finite. figures: of the last round of an evaluation; empty for a training. epsilon: what private
    rounds spent at their δ, which `privacy.spent(rounds)` computes again. diverged: the first round whose loss
    exploded, and what to try; None if none did. class_names, dropped: as of the population (`Population`).
    standardised: whether the model standardises its inputs, by the training users.
    """

    model: str
    dataset: str
    algorithm: str
    baseline: str | None
    settings: dict[str, object]
    rounds: int
    ended_by: Ending
    excluded: int
    figures: dict[str, float]
    epsilon: float | None
    privacy: SimulatedPrivacy | None
    cohort: int
    seed: int
    parameters: int
    engine: str | None
    engine_reason: str | None
    train_users: int
    test_users: int
    test_loss: float
    test_accuracy: float | None
    user_mean: float
    per_user: dict[str, float]
    curve: list[Point]
    params_sha256: str
    diverged: str | None = None
    class_names: tuple[str, ...] = ()
    dropped: int = 0
    standardised: bool = False

    def __repr__(self) -> str:
        return f"SimulationResult({self.words})"

    @property
    def words(self) -> str:
        """The result in a line."""
        accuracy = self.test_accuracy
        reached = f"loss {self.test_loss:.3f}" if accuracy is None else f"accuracy {accuracy:.3f}"
        by = self.baseline or self.algorithm
        diverged = f"; {self.diverged}" if self.diverged else ""
        trained = f"{self.model} on {self.dataset}, {by}, {self.rounds} rounds"
        return f"{trained}: {reached} of {self.test_users} users{diverged}"

    def _repr_html_(self) -> str:
        shown = ("model", "dataset", "baseline", "algorithm", "settings", "rounds", "ended_by", "parameters")
        measured = ("epsilon", "train_users", "test_users", "test_accuracy", "test_loss", "user_mean")
        facts = {name.replace("_", " "): getattr(self, name) for name in (*shown, *measured)}
        return facts_of("Simulation", facts | {f"users' {name}": value for name, value in self.per_user.items()})


def simulate(
    config: SimulationConfig,
    on_round: OnRound = lambda number, point: None,
    *,
    given: Overrides = Overrides(),
) -> SimulationResult:
    """Run a simulation; `muster.simulate` does it with objects as well as names, and keeps the model.

    Raises SimulatorError, ExportError or AlgorithmError, naming what is wrong; all but Diverged and ProcessDied before
    any work.
    """
    config = given.named(config)
    return advance(config, training_of(config, given=given), [], on_round)


@one_thread()
def advance(config: SimulationConfig, training: Training, course: list[Point], on_round: OnRound) -> SimulationResult:
    """Run the rounds of a simulation that come after `course`, which grows by them; gives the result of all.

    training: has done the rounds of `course`. Raises Diverged, and ProcessDied when a process of the engine ends.
    """
    limits = Limits(config.rounds, config.target_accuracy, config.patience)
    while (ended_by := limits.ending(course)) is None:
        number = len(course) + 1
        point: Point = {"round": number} | training.run_round(number)
        if number % config.evaluate_every == 0 or number == config.rounds:
            point |= measured(training.measure(number), training.test)
        course.append(point)
        on_round(number, point)
    return result_of(config, course, ended_by, training.facts, training.test, training.digest())


def result_of(
    config: SimulationConfig, course: Sequence[Point], ended_by: Ending, facts: Facts, test: Population, digest: str
) -> SimulationResult:
    """The result of a training with that course, whose last point must be measured. digest: of what was trained."""
    last = course[-1]
    return SimulationResult(
        model=config.model,
        dataset=config.dataset,
        baseline=config.baseline,
        rounds=len(course),
        ended_by=ended_by,
        excluded=sum(int(point.get("excluded", 0)) for point in course),
        figures={name: value for name, value in last.items() if name.startswith(f"{facts.algorithm}.")},
        epsilon=last.get("epsilon"),
        seed=config.seed,
        test_users=len(test),
        test_loss=last[LOSS],
        test_accuracy=last.get(ACCURACY),
        user_mean=last[USER_MEAN],
        per_user={f"p{percent}": last[f"{PER_USER}{percent}"] for percent in PERCENTILES},
        curve=[point for point in course if LOSS in point],
        params_sha256=digest,
        diverged=Watch(course).words,
        class_names=test.class_names,
        dropped=test.dropped,
        standardised=config.standardise,
        **asdict(facts),
    )


def completed(config: SimulationConfig, given: Overrides = Overrides()) -> SimulationConfig:
    """The same configuration with every setting of its algorithm or baseline, and the whole paths of its data.

    Raises AlgorithmError for a setting that is wrong, and DatasetError or UnknownModel for a name that is.
    """
    config = given.named(config)
    if given.users is None:
        datasets.describe(config.dataset, config.columns)
    if config.partition not in (None, NATURAL):
        read_partition(config.partition)
    if config.baseline not in METHODS and given.model is None:
        check_model_name(config.model)
    method = METHODS.get(config.baseline or "")
    settings = asdict(parse(method, config.settings)) if method else settings_of(given.algorithm or _algorithm(config))
    own = Path(config.dataset)
    dataset = str(own.resolve()) if config.dataset not in datasets.DATASETS and own.exists() else config.dataset
    paths = {name: getattr(config, name) for name in ("data", "plan", "start", "against")}
    whole = {name: path and path.resolve() for name, path in paths.items()}
    return replace(config, settings=settings, dataset=dataset, **whole)


@one_thread()
def training_of(config: SimulationConfig, engine: Wanted | None = None, given: Overrides = Overrides()) -> Training:
    """The training that a configuration asks for, before its first round. Raises as `simulate`.

    engine, given: instead of what the configuration names.
    """
    if config.baseline in METHODS:
        method = parse(METHODS[config.baseline], config.settings)
        train, test = (given.users or _users(config)).split(config.held_out, config.seed)
        return LinearTraining(config.model, method, train, test, seed=config.seed)
    algorithm = given.algorithm or _algorithm(config)
    check(algorithm)
    if config.same_cohort:
        check_two_trips(algorithm)
    users = given.users or _users(config)
    plan = None if config.plan is None else SimulatedPlan(config.plan)
    model, users = _model(config, plan, users, given)
    algorithm = for_model(algorithm, model.metrics[1:], model.schema)
    _check_own_models(config, algorithm)
    local = config.baseline == "local"
    computing = Computing(config.device) if local else _computing(config)
    if local:
        check_model(model, users, computing)
        return LocalOnly(model, algorithm, users, held_out=config.held_out, seed=config.seed, device=config.device)
    train, test = _split(config, users)
    hold_out = HoldOut.asked(config.hold_out_examples, on_held_out=config.on_held_out_examples)
    train = train.training_on(plan.examples if plan else ExampleSpec(model.spec.fields, hold_out=hold_out))
    clients, cohorts = _cohorts(config, train, len(test))
    cohorts = replace(cohorts, given=given.cohorts)
    make = _engine_of(config, model, algorithm, clients, cohorts)
    if plan is None:
        choice = choose(engine or config.engine, model, algorithm, users, computing)
    else:
        choice = plan.choice(computing)
        check_model(model, users, choice.computing)
    tuning = FineTuning.of(algorithm, config.fine_tune) if config.fine_tune else None
    training = EngineTraining(make(computing=choice.computing), test, cohorts, choice.reason, tuning)
    if plan is not None:
        training.restore(plan.state(algorithm))
    if config.against is not None:
        _compare_with(training, read_model(config.against, model.schema), algorithm)
    return training


def training_on(
    users: tuple[Population, Population],
    config: SimulationConfig,
    private: PrivateSums | None = None,
    given: Sequence[Sequence[int]] = (),
) -> Training:
    """The federated training of a configuration in the engine `torch`, on users who train and users who measure.

    private: the noise on sums, instead of what the configuration asks for. given: who trains in each round, in place of
    cohorts that are drawn.
    """
    spec = load_model(config.model, users[0].shape, users[0].classes)
    users = with_tokens(users[0], spec), with_tokens(users[1], spec)
    model = Model(spec.with_local(config.local), config.seed)
    algorithm = create(config.algorithm, config.settings, [module_of(config.algorithm)])
    cohorts = replace(_drawn(config, config.cohort), given=given)
    make = _engine_of(config, model, algorithm, users[0], cohorts)
    tuning = FineTuning.of(algorithm, config.fine_tune) if config.fine_tune else None
    if private is not None:
        make = functools.partial(make, private=private)
    engine = make(computing=Computing(at_once=TOGETHER))
    return EngineTraining(engine, users[1], cohorts, "small networks", tuning)


def _engine_of(
    config: SimulationConfig, model: Model, algorithm: Algorithm, clients: Population, cohorts: Cohorts
) -> functools.partial[Engine]:
    """An engine of clients who train in those cohorts, but for its computing.

    Raises PrivacyError or EngineError for options that do not go together.
    """
    secagg, compression = config.secagg, Compression.parse(config.compress)
    reports = CompressedReports(compression, model.schema, config.seed, algorithm.weighting)
    layouts = [reports.layout(trip.report, trip.ranges) for trip in layouts_of(model, algorithm)] if secagg else []
    promise, masked = None, None
    if config.privacy.asked:
        square = min(square_of(secagg, layout) for layout in layouts) if secagg else 0
        promise = promise_of(config.privacy, len(clients), cohorts, config.rounds, square)
        check_private(promise, algorithm)
    if secagg is not None:
        task = secure_task(secagg, cohorts, config.rounds, layouts, promise)
        warn_of_rounding(task, algorithm, layouts, model.schema.size)
        masked = functools.partial(MaskedSum, task)
    private = None if promise is None else PrivateSums(promise, config.seed)
    make = functools.partial(Engine, model, algorithm, clients, seed=config.seed)
    return functools.partial(make, compression=compression, private=private, masked=masked)


def model_of(config: SimulationConfig, given: Overrides = Overrides()) -> Model:
    """The model that a configuration trains, with the parameters that it starts from. Raises as `simulate`."""
    plan = None if config.plan is None else SimulatedPlan(config.plan)
    return _model(config, plan, given.users or _users(config), given)[0]


def _model(
    config: SimulationConfig, plan: SimulatedPlan | None, users: Population, given: Overrides
) -> tuple[Model, Population]:
    """The model, and the users with examples that it reads."""
    if plan is None:
        spec = given.model or load_model(config.model, users.shape, users.classes)
        if config.standardise:
            spec = _standardising(spec, _split(config, users)[0])
        spec = replace(spec, class_names=users.class_names or spec.class_names)
        model = Model(spec.with_local(config.local), config.seed)
    else:
        model = plan.model(given.model or config.model, config.seed)
    if config.start is not None:
        model.initial = read_model(config.start, model.schema)
    if config.target_accuracy is not None and "accuracy" not in model.metrics:
        raise EngineError(f"the model {config.model} has no metric accuracy, so target_accuracy cannot be reached")
    users = with_tokens(users, model.spec)
    users.check(model.spec.fields)
    return model, users


def _standardising(spec: ModelSpec, train: Population) -> ModelSpec:
    """The model behind the mean and the deviation of the training examples' `x`. Raises EngineError without numbers."""
    x: NDArray[Any] = train.fields.get("x", np.zeros(0, np.int64))
    if x.dtype.kind != "f":
        raise EngineError("standardise needs numbers in the field x, which the model reads")
    mean, deviation = (find(x, axis=0, dtype=np.float64).ravel() for find in (np.mean, np.std))
    constant = (x.max(0) == x.min(0)).ravel()
    return Normaliser("x", tuple(mean.tolist()), tuple(np.where(constant, 1, deviation).tolist())).before(spec)


def _compare_with(training: EngineTraining, other_D: Float32, algorithm: Algorithm) -> None:
    """Set the other model of a comparison. Raises EngineError for an algorithm that has none."""
    vectors = training.vectors()
    if (name := f"{SERVER}.other") not in vectors:
        raise EngineError(f"{algorithm.name} has no other model: leave against out, or take the algorithm compare")
    training.restore(vectors | {name: other_D})


def check_users(config: SimulationConfig, users: Population) -> None:
    """Raise what `training_of` raises where a configuration's users are too few for it, with all their examples."""
    if config.baseline in {None, "pooled"}:
        train, test = _split(config, users)
        _cohorts(config, train, len(test))


def _split(config: SimulationConfig, users: Population) -> tuple[Population, Population]:
    """Those who train, and those who measure, with the examples of each."""
    split = users.split_examples if config.own_examples else users.split
    return split(config.held_out, config.seed)


def _check_own_models(config: SimulationConfig, algorithm: Algorithm) -> None:
    """Raise EngineError for an algorithm that gives users models which nobody would measure."""
    if not isinstance(algorithm, PartlyLocal):
        return
    if config.baseline is not None:
        raise EngineError(
            f"the baseline {config.baseline} has no server for {algorithm.name} to share with: take fedavg"
        )
    if not config.own_examples or config.fine_tune:
        raise EngineError(
            f"{algorithm.name} gives every user who trains a model of their own: measure it with own_examples, and "
            "without fine_tune"
        )


def _cohorts(config: SimulationConfig, train: Population, test_users: int) -> tuple[Population, Cohorts]:
    """Those who train, and the cohorts that they form. Raises EngineError where they are too few."""
    held_out = 0 if config.own_examples else test_users
    clients, size = (train.pooled(), 1) if config.baseline == "pooled" else (train, config.cohort)
    cohorts = _drawn(config, size)
    cohorts.check(config.rounds, len(clients), held_out)
    return clients, cohorts


def _drawn(config: SimulationConfig, size: int) -> Cohorts:
    asked = config.privacy
    return Cohorts(size, config.schedule, config.same_cohort, asked.min_separation_rounds, asked.poisson)


def _users(config: SimulationConfig) -> Population:
    return datasets.load(config.dataset, config.data, config.clients, config.partition, config.columns)


def _algorithm(config: SimulationConfig) -> Algorithm:
    made = create(config.algorithm, config.settings, [module_of(config.algorithm)])
    if not isinstance(made, LocalTraining) or made.client_optimizer != "sgd":
        return made
    suited = SUITED.get(config.model, {}).items()
    return replace(made, **{name: value for name, value in suited if name not in config.settings})


def _computing(config: SimulationConfig) -> Computing:
    numbered = config.device not in {"cpu", "cuda", EVERY_GPU}
    if numbered and (config.ray is not None or (config.processes or 1) > 1):
        raise EngineError(
            f"{config.device!r} is one GPU, which several processes do not share; take --device={EVERY_GPU}"
        )
    device = "cuda" if config.device == EVERY_GPU else config.device
    if config.ray is not None:
        count = connect(config.ray, config.processes, on_gpus=device == "cuda")
        return Computing(device, processes=count, at_once=config.at_once, on_ray=True)
    default = usable_cores() if device == "cpu" else gpus() if config.device == EVERY_GPU else 1
    return Computing(device, processes=config.processes or default, at_once=config.at_once)
