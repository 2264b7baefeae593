"""One version of a model: loaded for batches of any size, and found again in the state folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from device_runtime.backends.backend import Arrays, Backend, Executable
from device_runtime.capabilities import random_field
from device_runtime.config import DeviceConfig, sealer_of
from device_runtime.errors import DeviceError, InputRefused, ModelRefused, PlanRefused
from device_runtime.permission.policy import Policy, policy_in, signed_release
from device_runtime.runner import aligned
from device_runtime.state.database import NAME, read_database
from device_runtime.state.folder import BLOBS, PersonalStore
from device_runtime.state.records import KeptVersion, ModelStore
from device_runtime.texts import LoadedTokenizer, has_library
from fedcore import checkpoint
from fedcore.errors import FedcoreError, why
from fedcore.params import Frozen, VectorSpec
from fedcore.plan import EXAMPLE, FROZEN, PARAMS, PREDICT, BlobRef, Field, Plan, PredictPlan, prefixed
from fedcore.release import Signed

FIXED_BATCH = frozenset({"executorch"})
"""Formats whose graphs take batches of the plan's size only."""
TRIAL_ROWS = 3
Inputs = Mapping[str, NDArray[Any] | Sequence[str]]
"""For each input an array (n, …), or n texts where the plan names a tokenizer."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a version, fetched and with the right digests. frozen: the file of what the plan freezes.

    tokenizers: their files, by the names of fields. personal: whether the parameters are those that this device made of
    the released ones.
    """

    release: Signed
    number: int
    plan: Plan
    graph: bytes
    parameters: bytes
    frozen: Path | None = None
    tokenizers: Mapping[str, bytes] = field(default_factory=dict)
    personal: bool = False


class Version:
    """A loaded version. Calls from several threads run one at a time: a graph is not to be shared."""

    def __init__(self, parts: Parts, predict: PredictPlan, graph: Executable, form: str, weights: Arrays) -> None:
        self.release, self.number, self.personal = parts.release, parts.number, parts.personal
        fields = {item.name: item for item in parts.plan.examples.fields}
        self._fields = {name: fields[name] for name in predict.inputs}
        self._outputs, self._tokenizers = predict.outputs, parts.tokenizers
        self._loaded: dict[str, LoadedTokenizer] = {}
        self._fixed = predict.batch_size if form in FIXED_BATCH else 0
        self._graph, self._weights = graph, weights
        self._lock = threading.Lock()
        self._rows = 0
        self._given: Arrays = {}
        self._bound: Arrays = {}
        self._made: Arrays = {}

    def predict(self, inputs: Inputs) -> dict[str, NDArray[Any]]:
        """The outputs (n, …) for examples (n, …) of every input, or n texts, n at least 1, in arrays of their own.

        Raises InputRefused when they do not fit, RuntimeFailed when an operator fails.
        """
        examples = {name: self._array(name, given) for name, given in inputs.items()}
        count = self._checked(examples)
        size = self._fixed or count
        with self._lock:
            self._reserve(size)
            if count <= size:
                return self._run(examples, 0, count, size)
            parts = [self._run(examples, start, count, size) for start in range(0, count, size)]
        return {item.name: np.concatenate([part[item.name] for part in parts]) for item in self._outputs}

    def try_out(self) -> None:
        """Predict one batch of random examples. Raises ModelRefused unless every output is finite and as declared."""
        random = np.random.default_rng(0)
        try:
            rows = self._fixed or TRIAL_ROWS
            texts = self._tokenizers.keys() if has_library() else ()
            outputs = self.predict(
                {
                    name: ["a"] * rows if name in texts else random_field(item, rows, random)
                    for name, item in self._fields.items()
                }
            )
        except DeviceError as error:
            raise ModelRefused(f"version {self.number} fails on trial: {error.detail}", error.private) from error
        except (ValueError, MemoryError) as error:
            raise ModelRefused(f"version {self.number} cannot be tried: {error}") from error
        for name, values in outputs.items():
            if not np.isfinite(values).all():
                raise ModelRefused(f"version {self.number} gives {name!r} that is not finite on trial")

    def _array(self, name: str, given: NDArray[Any] | Sequence[str]) -> Any:
        """The values of an input; of texts, their tokens. Raises InputRefused."""
        if isinstance(given, np.ndarray) and given.dtype.kind == "U":
            given = given.tolist()
        if name not in self._tokenizers or isinstance(given, np.ndarray):
            return given
        if isinstance(given, str) or not all(isinstance(text, str) for text in given):
            raise InputRefused(f"input {name!r} takes a list of texts, or an array of their tokens")
        item = self._fields[name]
        try:
            with self._lock:
                if name not in self._loaded and item.tokenizer is not UNSET:
                    self._loaded[name] = LoadedTokenizer(item, self._tokenizers[name], item.tokenizer.padding)
                return self._loaded[name].tokens(given, len(given)).ids
        except PlanRefused as error:
            raise InputRefused(error.detail, error.private) from error

    def _run(self, examples: Arrays, start: int, count: int, size: int) -> dict[str, NDArray[Any]]:
        """The outputs for the rows from `start` on, at most `size` of `count`. A shorter batch is filled with zeros."""
        real = min(size, count - start)
        for name, buffer in self._given.items():
            buffer[:real] = examples[name][start : start + real]
            if real < size:
                buffer[real:] = 0
        self._graph.run(self._bound, self._made)
        return {name: array[:real].copy() for name, array in self._made.items()}

    def _reserve(self, rows: int) -> None:
        """Make the buffers of a batch, unless those of the last call do. The same arrays are bound only once."""
        if rows == self._rows:
            return
        self._rows = 0
        self._given = {name: aligned((rows, *item.shape), item.dtype) for name, item in self._fields.items()}
        self._bound = {**self._weights, **prefixed(EXAMPLE, self._given)}
        self._made = {item.name: aligned((rows, *item.shape), item.dtype) for item in self._outputs}
        self._rows = rows

    def _checked(self, examples: Arrays) -> int:
        """The number of examples. Raises InputRefused."""
        if examples.keys() != self._fields.keys():
            missing, unknown = self._fields.keys() - examples.keys(), examples.keys() - self._fields.keys()
            raise InputRefused(f"inputs are missing: {sorted(missing)}; the model knows none of: {sorted(unknown)}")
        counts = {len(_fitting(item, examples[name])) for name, item in self._fields.items()}
        if counts == {0} or len(counts) > 1:
            raise InputRefused(f"the inputs hold {sorted(counts)} examples; all must hold the same number, at least 1")
        return counts.pop()


def load(parts: Parts, backend: Backend) -> Version:
    """Load a version. The graph passes the checks that graphs of training pass.

    Raises ModelRefused when the plan has no predict graph in this backend's format, the graph cannot be loaded, or
    parameters or frozen vectors do not fit the plan or are not finite.
    """
    predict, specs = predict_of(parts.plan, backend.format), (VectorSpec(PARAMS, parts.plan.schema.size),)
    try:
        weights: dict[str, Frozen] = {}
        for name, parameters in checkpoint.decode(parts.parameters, specs).items():
            weights[name] = aligned(parameters.shape)
            weights[name][:] = parameters
        if parts.plan.frozen is not None and parts.frozen is not None:
            weights |= prefixed(FROZEN, checkpoint.map_frozen(parts.frozen, parts.plan.frozen.vectors))
        for name, vector in weights.items():
            if not np.isfinite(vector).all():
                raise ModelRefused(f"vector {name!r} of version {parts.number} is not finite")
        return Version(parts, predict, backend.load(parts.graph, PREDICT), backend.format, weights)
    except (FedcoreError, OSError) as error:
        raise ModelRefused(str(error)) from error
    except ModelRefused:
        raise
    except DeviceError as error:
        raise ModelRefused(error.detail, error.private) from error


def predict_of(plan: Plan, form: str) -> PredictPlan:
    """The predict member of a plan. Raises ModelRefused unless it has a graph in format `form`."""
    if plan.predict is None:
        raise ModelRefused(f"plan {plan.name!r} has no predict graph")
    if form not in plan.predict.graphs:
        forms = sorted(plan.predict.graphs)
        raise ModelRefused(f"plan {plan.name!r} predicts in formats {forms}, this device runs {form!r}")
    return plan.predict


def _fitting(item: Field, values: object) -> NDArray[Any]:
    """The rows of one input. Raises InputRefused, without a value, unless they fit the field."""
    if not isinstance(values, np.ndarray):
        raise InputRefused(f"input {item.name!r} is of type {type(values).__name__}, not a NumPy array")
    if values.dtype != item.dtype or values.ndim == 0 or values.shape[1:] != item.shape:
        raise InputRefused(
            f"input {item.name!r} is {values.dtype}{list(values.shape)}, the model takes {item.dtype}"
            f"[n{''.join(f', {size}' for size in item.shape)}]"
        )
    if item.high is not None and not item.holds(values).all():
        raise InputRefused(f"input {item.name!r} holds a value outside 0 … {item.high - 1}")
    return values


_LOG = logging.getLogger(__name__)


def policy_of(config: DeviceConfig) -> Policy:
    """What this device may do. Raises ConfigError."""
    return config.policy or policy_in(config.state)


def personal_store(config: DeviceConfig, name: str) -> PersonalStore:
    """The store of a model's personal parameters."""
    return PersonalStore(config.state, sealer_of(config), config.population, name)


def kept_version(config: DeviceConfig, name: str, backend: Backend) -> Version | None:
    """The version that this device has, with its personal parameters if there are any.

    None if there is none, or a warning says why it cannot be used any more.
    """
    if not (config.state / NAME).is_file():
        return None
    try:
        with read_database(config.state) as database:
            current = ModelStore(database, config.population, name).get().current
        if current is None:
            return None
        parts = kept_parts(config, current, backend)
        return load(with_personal(config, name, parts), backend)
    except DeviceError as error:
        _LOG.warning("the kept version of model %s cannot be used: %s", name, error)
        return None


def kept_parts(config: DeviceConfig, current: KeptVersion, backend: Backend) -> Parts:
    """The parts of a kept version as it was released. The policy may have changed since, and files too.

    Raises ModelRefused.
    """
    release = signed_release(policy_of(config), current.release)
    try:
        plan = Plan.decode(_read(config, release.plan))
        frozen = None if plan.frozen is None else _checked(config, plan.frozen.blob)
        graph = _read(config, predict_of(plan, backend.format).graphs[backend.format])
        tokenizers = {name: _read(config, ref) for name, ref in plan.tokenizers.items()}
        parameters = _read(config, release.parameters)
        return Parts(current.release, release.number, plan, graph, parameters, frozen, tokenizers)
    except FedcoreError as error:
        raise ModelRefused(str(error)) from error


def with_personal(config: DeviceConfig, name: str, parts: Parts) -> Parts:
    """The parts with the personal parameters, unless there are none, or a warning says why they cannot be had."""
    try:
        own = personal_store(config, name).get(parts.release)
    except DeviceError as error:
        _LOG.warning("the personal parameters of model %s cannot be used, the released ones are: %s", name, error)
        return parts
    return parts if own is None else replace(parts, parameters=own, personal=True)


def _read(config: DeviceConfig, ref: BlobRef) -> bytes:
    return ref.check(_checked(config, ref).read_bytes())


def _checked(config: DeviceConfig, ref: BlobRef) -> Path:
    path = config.state / BLOBS / ref.sha256
    try:
        ref.check_file(path)
        return path
    except OSError as error:
        raise ModelRefused(f"blob {ref.sha256[:12]}… is not in the cache any more: {why(error)}") from error
