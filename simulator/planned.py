"""Plans and questions in a simulation: a bundle or a model's file to train, and a question to the clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from coordinator.errors import InvalidTask
from coordinator.rules.aggregation import check_fit, state_specs
from device_runtime.errors import DeviceError
from device_runtime.examples.source import padded, unpadded
from device_runtime.texts import TextColumn
from export.build import planned_model, source_of
from export.model import Model, ModelSpec
from export.questions.heavy_hitters import AnyQuestion
from fedcore.algorithms import create, module_of, name_of, settings_of
from fedcore.algorithms.algorithm import Algorithm
from fedcore.bundle import AlgorithmRef, Bundle
from fedcore.checkpoint import decode
from fedcore.compression import Compression
from fedcore.errors import QuestionError, SchemaError, UntrustedAlgorithm, why
from fedcore.params import Float32, ParamSchema
from fedcore.plan import BlobRef, ExampleSpec, Field, prefixed
from fedcore.questions.answer import Answer, answer_of
from fedcore.validation import build_one, own_name
from simulator.configuration import PrivateTraining, SimulationConfig
from simulator.engine import Engine
from simulator.engines.choice import Choice
from simulator.engines.computing import Computing
from simulator.errors import DatasetError, Diverged, EngineError
from simulator.population import Array, Population, longest
from simulator.private_training import Cohorts, PrivateSums, SimulatedPrivacy, promise_of
from simulator.training import SERVER, Vectors

# A question to the clients of a simulation, whose texts are a model's tokens.


def with_tokens(users: Population, spec: ModelSpec) -> Population:
    """The same users with tokens in place of their texts, as devices make them; users without texts as they are.

    A field of bytes that has no tokenizer becomes uint8 (N, bytes), UTF-8 and zeros. Raises DatasetError for a text
    that is no UTF-8 or too long, and where the tokenizer does not fit the model.
    """
    fields, blobs = dict(users.fields), {BlobRef.of(data).sha256: data for data in spec.tokenizers}
    for field in spec.fields:
        texts = fields.get(field.name, np.zeros(0))
        if field.tokenizer is UNSET:
            if texts.dtype == object and field.dtype == "uint8" and len(field.shape) == 1:
                fields[field.name] = _padded(texts, field)
        elif texts.dtype in (object, np.uint8):
            blob = blobs[field.tokenizer.blob.sha256]
            column = TextColumn(field, blob, field.tokenizer.padding, unpadded(texts))
            try:
                fields[field.name] = column.tokens(lambda: True).ids
            except DeviceError as error:
                raise DatasetError(str(error)) from error
    return replace(users, fields=fields)


def as_devices_hold(shard: Mapping[str, Array]) -> dict[str, Array]:
    """A client's examples as arrays that a device reads: its texts with zeros at their ends, as long as its longest."""
    return {name: padded(array, longest(array)) if array.dtype == object else array for name, array in shard.items()}


def _padded(texts: Array, field: Field) -> Array:
    if longest(texts) > field.shape[0]:
        raise DatasetError(
            f"field {field.name!r} has a text of {longest(texts)} bytes; the model reads {field.shape[0]}"
        )
    return padded(texts, field.shape[0])


def ask_population(
    asked: AnyQuestion,
    population: Population,
    *,
    seed: int = 0,
    rounds: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> Answer:
    """What all clients with rows answer, in every round, as devices without any give up.

    rounds: by default as many as an answer takes.

    epsilon, delta: with noise for such a promise.

    Raises EngineError when the data lack a field, PrivacyError for a promise that cannot be, QuestionError when clients
    have more rows than their sums hold.
    """
    model, algorithm, cohort = Model(asked.spec()), asked.algorithm(), np.flatnonzero(population.sizes).tolist()
    clients = len(cohort)
    rounds = asked.rounds if rounds is None else rounds
    promise: SimulatedPrivacy | None = None
    if epsilon is not None:
        private = PrivateTraining(epsilon=epsilon, delta=1 / (10 * clients) if delta is None else delta)
        promise = promise_of(private, clients, Cohorts(clients), rounds)
    sums = None if promise is None else PrivateSums(promise, seed)
    engine = Engine(model, algorithm, with_tokens(population, model.spec), seed=seed, private=sums)
    for number in range(1, rounds + 1):
        try:
            excluded = engine.run_round(number, cohort).excluded
        except Diverged:
            excluded = clients
        if excluded:
            raise QuestionError(
                f"{excluded:,} of {clients:,} clients have more rows than exact sums hold: MAX n ROWS PER DEVICE draws "
                "some of them, or CAST what is summed AS REAL"
            )
    multiplier = 0.0 if promise is None else promise.noise_multiplier * math.sqrt(rounds)
    reference = AlgorithmRef(name_of(algorithm), settings_of(algorithm))
    return answer_of(reference, model.schema.unflatten(engine.state["params"]), multiplier, rounds)


# A plan bundle or a model's file in a simulation: model, algorithm, graphs and initial state.


def read_model(path: Path, schema: ParamSchema) -> Float32:
    """The parameters (D,) in a safetensors file of a model's tensors. Raises EngineError when it does not hold them."""
    import safetensors.numpy  # the engine loads without it

    try:
        return schema.flatten(safetensors.numpy.load(path.read_bytes()))
    except OSError as error:
        raise EngineError(f"cannot read the model in {path}: {why(error)}") from error
    except (safetensors.SafetensorError, KeyError, ValueError) as error:  # KeyError: a type that NumPy lacks
        raise EngineError(f"{path} holds no model as runs and `muster task checkpoint` write it: {error}") from error
    except SchemaError as error:
        raise EngineError(f"{path} holds another model than the one that is named: {error}") from error


_REMEDY = "leave the option out, or export another plan"


def completed_by_plan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a simulation, with those that its `plan` fixes: model, algorithm, settings, compression, hold-out.

    A user's own model or algorithm must be among the options, because importing a module that a bundle names would run
    its author's code. Raises UnknownModel or UntrustedAlgorithm if it is not, PlanError for a folder that is no bundle,
    and EngineError for an option that contradicts the plan.
    """
    folder = build_one(SimulationConfig, "plan", values["plan"])
    bundle = Bundle(folder)
    said = bundle.manifest
    values = {**values, **{key: own_name(values[key]) for key in ("model", "algorithm") if key in values}}
    named = values.get("algorithm")
    if named is None and module_of(said.algorithm.name):
        raise UntrustedAlgorithm(
            f"the plan's algorithm is {said.algorithm.name!r}; if you trust its code, name it with --algorithm"
        )
    hold_out = bundle.plan.examples.hold_out
    fixed = {
        "algorithm": said.algorithm.name,
        "compress": said.compress,
        "hold_out_examples": hold_out.share if hold_out else 0.0,
        "on_held_out_examples": hold_out is not None and hold_out.side == "held-out",
    }
    for name, value in fixed.items():
        if values.get(name, value) != value:
            raise EngineError(f"{name} is {value!r} in {bundle.folder}, not {values[name]!r}; {_REMEDY}")
    settings = _settings(said.algorithm.name, said.algorithm.settings, values.get("settings", {}))
    model = source_of(bundle, values.get("model"))
    return {**values, **fixed, "plan": folder, "model": model, "settings": settings}


def _settings(name: str, planned: Mapping[str, object], options: Mapping[str, object]) -> dict[str, Any]:
    """The settings of a plan. Raises EngineError when an option contradicts one."""
    settings, wanted = (
        settings_of(create(name, values, [module_of(name)])) for values in (planned, {**planned, **options})
    )
    for key, value in settings.items():
        if wanted[key] != value:
            raise EngineError(f"the setting {key} is {value} in the plan, not {wanted[key]}; {_REMEDY}")
    return settings


class SimulatedPlan:
    """A plan bundle whose graphs train, from its own initial state.

    Raises PlanError for a folder that is no bundle, and EngineError if reports are not compressed as it says.
    """

    def __init__(self, folder: Path) -> None:
        self._bundle = Bundle(folder)
        self._plan = self._bundle.plan
        compression = Compression.parse(self._bundle.manifest.compress)
        for trip in self._plan.trips:
            if compression.coded(trip.report.decoded, trip.schema) != trip.report:
                raise EngineError(f"the plan in {folder} compresses reports otherwise than its manifest says")

    def model(self, source: str | ModelSpec, seed: int) -> Model:
        """The model that held-out users measure. Raises EngineError when it is not the plan's, and as `planned_model`.

        seed: of the weights that the plan does not fix.
        """
        model = planned_model(self._bundle, source, seed)
        if model.schema != self._plan.schema or model.spec.fields != self._plan.examples.fields:
            raise EngineError(
                f"the model {model.spec.name} has other parameters or fields than the plan in {self._bundle.folder}, "
                "which was made before the model changed, or of another one; export it again"
            )
        return model

    @property
    def examples(self) -> ExampleSpec:
        """The examples that the plan runs on."""
        return self._plan.examples

    def choice(self, computing: Computing) -> Choice:
        """The plan's own graphs. Raises EngineError where they cannot run."""
        from simulator.engines.graphs import graphs_of  # needs ONNX Runtime

        if computing.on_gpu:
            raise EngineError(f"the graphs of a plan run on the CPU, not on {computing.device}; leave --device out")
        if "onnx" not in self._plan.graphs:
            raise EngineError(
                f"the plan in {self._bundle.folder} has graphs for {', '.join(self._plan.graphs)} only; export it "
                "again with onnx among --format"
            )
        graphs = graphs_of(self._plan, self._bundle.read)
        return Choice(replace(computing, graphs=graphs), "the graphs of the plan")

    def state(self, algorithm: Algorithm) -> Vectors:
        """The initial state of tasks on the plan, in the form from which a training is restored.

        Raises EngineError when plan, algorithm and state do not fit, and PlanError when the bundle lacks the state.
        """
        data = self._bundle.read(self._bundle.manifest.state)
        try:
            state = decode(data, state_specs(self._plan, algorithm))
            check_fit(self._plan, algorithm, state)
        except (SchemaError, InvalidTask) as error:
            raise EngineError(f"the plan in {self._bundle.folder} is not one of {algorithm.name}: {error}") from error
        return {**prefixed(SERVER, state)}
