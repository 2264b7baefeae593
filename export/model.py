"""A trainable model as functions of a flat vector: built from a ModelSpec, used by the exporter and the simulator.

Shapes: D parameters, B batch, M metric sums; a leading K, where present, counts clients.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from export.errors import ExportError, InvalidModel, reason
from export.layers import HOOKED, refuse_unsupported
from export.rewrites import IgnoredLabels, KeyedNoise
from export.weights import Checkpoint, matching
from fedcore.algorithms.algorithm import Pass
from fedcore.params import Float32, Frozen, ParamSchema, TensorSpec
from fedcore.plan import OUTPUT, Dtype, Field, prefixed

KEPT_BUFFERS = torch.float32, torch.uint8
"""The types of buffers that travel; others are constants of graphs."""
PerExample = Callable[..., Tensor]
"""(outputs (B, …), label (B, …)) -> (B,); of a spec that `compares`, (outputs, label, mask (B,)) -> (B,)."""


def accuracy(outputs: Tensor, label: Tensor) -> Tensor:
    """1 where the largest output is the label, else 0, per example (B,)."""
    return (outputs.argmax(-1) == label).to(torch.float32)


def cross_entropy(outputs: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of logits (B, C) against class indices (B,), per example (B,)."""
    return nn.functional.cross_entropy(outputs, label, reduction="none")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A user's description of a model to train.

    make: builds the module; its initial weights are drawn under the seed given to `Model`.
    loss: per example, never averaged over the batch: the framework takes the masked mean, so that padding does not
    count. metrics: more per-example numbers, averaged for the learning curve; under a tuple of n names, n of them at
    once, (B, n).
    inputs: the module's positional arguments, as fields of an example. label: the field the loss compares with; it may
    be one of them. compares: the loss and metrics take the batch's mask (B,) as third argument, and may compare an
    example with others that it keeps. predicts: how many of the inputs, from the first, the predict graph calls the
    module with; None for all.
    Parameters that do not require a gradient, and float32 and uint8 buffers, are frozen: they are no part of the flat
    vector, and reach devices once. checkpoint: the values to start from, instead of those that `make` gives.
    examples: makes n examples, every field (n, *shape), for models whose inputs have a domain (logarithms, lengths,
    probabilities); without it the trials of export draw them at random. local: parameters that stay on a client, by
    name or pattern, such as "head.*", for algorithms such as fedper. exact: builds the same module with exact weights,
    where `make` gives some in few bits: the certificate says what these cost. tokenizers: the files that fields name.
    class_names: of the label's classes, by number, for the bundle.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: PerExample
    inputs: tuple[Field, ...]
    label: Field
    metrics: Mapping[str | tuple[str, ...], PerExample] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    examples: Callable[[int, np.random.Generator], Mapping[str, np.ndarray]] | None = None
    local: Sequence[str] = ()
    exact: Callable[[], nn.Module] | None = None
    tokenizers: Sequence[bytes] = ()
    compares: bool = False
    predicts: int | None = None
    class_names: tuple[str, ...] = ()

    def with_local(self, patterns: str) -> ModelSpec:
        """The same model with these local parameters, by commas; with "" those that it has."""
        return replace(self, local=tuple(map(str.strip, patterns.split(",")))) if patterns else self

    def __post_init__(self) -> None:
        _check_types(self)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of all metrics: those of one number first."""
        single = [key for key in self.metrics if isinstance(key, str)]
        return (*single, *(name for key in self.metrics if not isinstance(key, str) for name in key))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every field of an example. A label that is an input too, as of language models, is there once."""
        return self.inputs if self.label in self.inputs else (*self.inputs, self.label)

    @property
    def asked(self) -> tuple[Field, ...]:
        """The inputs of the predict graph."""
        return tuple(self.inputs[: self.predicts])


class GradientOracle:
    """The gradient oracle of the algorithm contract on one batch; remembers the metric sums of its last call."""

    def __init__(self, model: Model, batch: Mapping[str, Tensor], mask: Tensor, noise: Tensor | None = None) -> None:
        self._model, self._batch, self._mask, self._noise = model, batch, mask, noise
        self.sums = mask.new_zeros(len(model.metrics))

    def __call__(self, params_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """params: (D,). Returns the masked-mean loss (1,), its gradient (D,) and the number of examples (1,)."""
        # Separate leaves, not slices of one: differentiating through slices makes a zero-filled D-vector per tensor.
        leaves = {name: part.detach().requires_grad_() for name, part in self._model.tensors(params_D).items()}
        loss, self.sums = self._model.loss(leaves, self._batch, self._mask, self._noise)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        flat_D = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return loss.detach().reshape(1), flat_D, self.sums[:1]


class MeasureOracle:
    """The oracle of a forward pass on one batch. model: one that evaluates; remembers the sums of its last call."""

    def __init__(self, model: Model, batch: Mapping[str, Tensor], mask: Tensor) -> None:
        self._model, self._batch, self._mask = model, batch, mask
        self.sums = mask.new_zeros(len(model.metrics))

    def __call__(self, params_D: Tensor) -> Tensor:
        """params: (D,). Returns the masked sums (M,) of examples, loss and metrics."""
        with torch.no_grad():
            _, self.sums = self._model.loss(self._model.tensors(params_D), self._batch, self._mask)
        return self.sums


def oracle_of(
    item: Pass, model: Model, batch: Mapping[str, Tensor], mask: Tensor, noise: Tensor
) -> MeasureOracle | GradientOracle:
    """The oracle that the steps of a pass call, on one batch. model: one that evaluates, if the pass is forward."""
    return MeasureOracle(model, batch, mask) if item.forward else GradientOracle(model, batch, mask, noise)


class Model:
    """A built ModelSpec. It is stateless: everything is a function of given parameters.

    Raises InvalidModel or UnsupportedModule, naming the layer, when it cannot be trained on devices.
    """

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        self.spec, self.seed = spec, seed
        _check_names(spec)
        for item in spec.fields:
            if not item.dtype.startswith("float") and item.high is None:
                raise InvalidModel(
                    f"field {item.name!r} is {item.dtype}: say its range, Field(..., high=N) for 0 … N − 1"
                )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.module = _made(spec)
        refuse_unsupported(self.module)
        if spec.checkpoint is not None:
            spec.checkpoint.load_into(self.module)
        self.frozen = _frozen(self.module)
        trainable = {name: value for name, value in self.module.named_parameters() if value.requires_grad}
        tensors = tuple(TensorSpec(name, tuple(value.shape)) for name, value in trainable.items())
        self.schema = ParamSchema(tensors, matching("trained parameter", spec.local, trainable))
        self.initial: Float32 = self.schema.flatten({name: value.detach().numpy() for name, value in trainable.items()})
        for name, value in (trainable | self.frozen).items():
            if not torch.isfinite(value).all():
                raise InvalidModel(f"{spec.name}: the initial weights of {name} hold a number that is not finite")
        self._given: Mapping[str, Tensor] = {}
        self._device = torch.device("cpu")
        self.metrics = ("examples", "loss", *spec.metric_names)

    @functools.cached_property
    def noisy(self) -> bool:
        """Whether training draws random numbers. Raises InvalidModel when the module does not accept its inputs."""
        example = {
            item.name: torch.zeros((1, *item.shape), dtype=getattr(torch, item.dtype), device=self._device)
            for item in self.spec.fields
        }
        try:
            with torch.no_grad(), KeyedNoise(torch.zeros(1, dtype=torch.int32, device=self._device)) as noise:
                self.module(*(example[item.name] for item in self.spec.inputs))
        except Exception as error:  # whatever the user's own code raises
            shapes = ", ".join(f"{item.name} {[1, *item.shape]}" for item in self.spec.inputs)
            raise InvalidModel(f"{self.spec.name} does not run on a batch of {shapes}: {reason(error)}") from error
        return bool(noise.turns)

    def on(self, device: torch.device) -> Model:
        """The same model with its frozen tensors and buffers on a compute device."""
        if device == self._device:
            return self
        moved = copy.copy(self)
        moved.module, moved._device = copied(self.module).to(device), device
        return moved

    def evaluating(self) -> Model:
        """The same model in eval mode, where nothing is drawn. Its module is a copy: later changes do not reach it."""
        other = copy.copy(self)
        other.module = copied(self.module).eval()
        other.frozen = _frozen(other.module)
        other.__dict__["noisy"] = False  # the cached value is that of training
        return other

    @property
    def frozen_vectors(self) -> dict[str, Frozen]:
        """The frozen tensors, flat, by name: parameters that do not require a gradient, float32 and uint8 buffers."""
        return {name: value.detach().reshape(-1).numpy() for name, value in self.frozen.items()}

    def with_frozen(self, vectors: Mapping[str, Tensor]) -> Model:
        """The same model with other frozen tensors, each given flat as (size,)."""
        bound = copy.copy(self)
        bound._given = {name: value.reshape(self.frozen[name].shape) for name, value in vectors.items()}
        return bound

    def freeze(self, vectors: Mapping[str, Frozen]) -> None:
        """Set the values of all frozen tensors, in the form of `frozen_vectors`."""
        with torch.no_grad():
            for name, value in self.frozen.items():
                value.copy_(torch.from_numpy(vectors[name]).reshape(value.shape))

    def trained(self, params_D: Float32) -> Model:
        """The same model in eval mode, with these parameters in its module, which is a copy."""
        other = self.evaluating()
        with torch.no_grad():
            for name, value in self.tensors(torch.from_numpy(params_D)).items():
                other.module.get_parameter(name).copy_(value)
        return other

    def tensors(self, params: Tensor) -> dict[str, Tensor]:
        """Views of a vector (D,) or (K, D) as the module's tensors, each with the same leading axes."""
        parts = torch.split(params, [spec.size for spec in self.schema.tensors], -1)
        return {
            spec.name: part.reshape((*params.shape[:-1], *spec.shape))
            for spec, part in zip(self.schema.tensors, parts, strict=True)
        }

    def measure(
        self, tensors: Mapping[str, Tensor], batch: Mapping[str, Tensor], mask: Tensor, noise: Tensor | None = None
    ) -> dict[Any, Tensor]:
        """The loss and every metric by its key, per example (B,), or (B, n) of n at once.

        batch: fields (B, …). mask: float32 (B,), 1 for what is no padding; only a spec that `compares` reads it.
        noise: int32 (B,), the source of dropout and random numbers; without it nothing is drawn.
        Missing parameters are the module's own. Raises InvalidModel when the loss or a metric is not one number per
        example.
        """
        label = batch[self.spec.label.name]
        # A small type saves room on the device; torch's losses want int64, and uint8 would wrap.
        label = label if label.is_floating_point() else label.long()
        outputs = self._called(self.spec.inputs, tensors, batch, noise)
        given = (outputs, label, mask) if self.spec.compares else (outputs, label)
        with IgnoredLabels() if self.spec.label.ignored is not UNSET else contextlib.nullcontext():
            calls: dict[Any, PerExample] = {"loss": self.spec.loss, **self.spec.metrics}
            values = {name: call(*given) for name, call in calls.items()}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise InvalidModel(f"{self.spec.name}: {name} is {type(value).__name__}, not one number per example")
            if value.dtype == torch.float64 and mask.dtype != torch.float64:
                raise InvalidModel(f"{self.spec.name}: {name} is float64, not float32; end it with .float()")
            if value.shape != (label.shape[0], *(() if isinstance(name, str) else (len(name),))):
                raise InvalidModel(
                    f"{self.spec.name}: {name} has shape {_shape(value, label)}, of outputs {_shape(outputs, label)} "
                    f"and labels {_shape(label, label)}; expected [B], one number per example: a torch loss does that "
                    "with reduction='none', and outputs and labels of one shape"
                )
        return values

    def predict(self, tensors: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the module gives, by name: `output`, or `output.<place>` of a sequence, `output.<key>` of a mapping.

        batch: the input fields (B, …). Missing parameters are the module's own. Raises InvalidModel for anything else
        than tensors.
        """
        outputs = self._called(self.spec.asked, tensors, batch, None)
        if isinstance(outputs, tuple | list):
            outputs = {str(place): output for place, output in enumerate(outputs)}
        named = prefixed(OUTPUT, outputs) if isinstance(outputs, Mapping) else {OUTPUT: outputs}
        for name, output in named.items():
            if not isinstance(output, Tensor):
                raise InvalidModel(f"{self.spec.name} gives {name} as {type(output).__name__}, not as a tensor")
        return named

    def _called(
        self, inputs: Sequence[Field], tensors: Mapping[str, Tensor], batch: Mapping[str, Tensor], noise: Tensor | None
    ) -> Any:
        given = held(self.module, {**self._given, **tensors})
        with KeyedNoise(noise), given, torch.autograd.graph.disable_saved_tensors_hooks(HOOKED):
            return self.module(*(batch[item.name] for item in inputs))

    def loss(
        self,
        tensors: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        mask: Tensor,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Masked-mean loss () over one batch, and the masked sums (M,) of `self.metrics`.

        mask: float32 (B,) of zeros and ones, not all zero. Raises InvalidModel as `measure` does.
        """
        values = self.measure(tensors, batch, mask, noise)
        single = [(value.detach() * mask).sum() for name, value in values.items() if isinstance(name, str)]
        # In float64, as float32 would round with each of thousands of rows. ExecuTorch's sum in float32 is the mean,
        # times the number of rows: whole sums would not stay whole.
        several = [
            (value.detach() * mask[:, None]).double().sum(0).to(mask.dtype)
            for name, value in values.items()
            if not isinstance(name, str)
        ]
        sums = torch.stack([mask.sum(), *single])
        sums = torch.cat([sums, *several]) if several else sums
        return (values["loss"] * mask).sum() / mask.sum(), sums


@contextlib.contextmanager
def held(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers of the module during the block, each by the first of its names.

    A parameter with several names is replaced under all of them. torch.func.functional_call restores name by name; for
    a layer with two names it would restore its own replacement, and the tie would be lost.
    """
    names: dict[Any, str] = {tensor: name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    stores: list[Any] = [store for layer in module.modules() for store in (layer._parameters, layer._buffers)]
    own = [
        (store, key, tensor) for store in stores for key, tensor in store.items() if names.get(tensor, "") in tensors
    ]
    try:
        for store, key, tensor in own:
            store[key] = tensors[names[tensor]]
        yield
    finally:
        for store, key, tensor in own:
            store[key] = tensor


def copied(module: nn.Module) -> nn.Module:
    """A deep copy. Tensors that forward left in a layer, such as activations, lose their autograd history."""
    tensors = [
        tensor for layer in module.modules() for tensor in tree_leaves(vars(layer)) if isinstance(tensor, Tensor)
    ]
    return copy.deepcopy(module, {id(tensor): tensor.detach() for tensor in tensors if not tensor.is_leaf})


def parameter_count(spec: ModelSpec) -> int:
    """The number of trained parameters, without allocating them. Raises InvalidModel when make() fails."""
    with torch.device("meta"):
        return sum(value.numel() for value in _made(spec).parameters() if value.requires_grad)


def _shape(value: object, label: Tensor) -> str:
    """A shape in words, in which the batch is B."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    batch = str(label.shape[0])
    return f"[{', '.join('B' if str(size) == batch else str(size) for size in value.shape)}]"


def _check_types(spec: ModelSpec) -> None:
    """Refuse what type checkers would, in words for users who have none."""
    name = spec.name
    if not isinstance(name, str):
        raise InvalidModel(f"the name of a model is a text, not {name!r}")
    if isinstance(spec.make, nn.Module):
        raise InvalidModel(f"{name}: make is a module; give the function or class that builds one, as in make=Net")
    if isinstance(spec.inputs, Field):
        raise InvalidModel(f"{name}: inputs is one Field; write (Field(…),), with a comma")
    for role, call in {"make": spec.make, "loss": spec.loss, "examples": spec.examples or _made}.items():
        if not callable(call):
            raise InvalidModel(f"{name}: {role} is {type(call).__name__}, not a function")
    if not isinstance(spec.metrics, Mapping) or not all(callable(metric) for metric in spec.metrics.values()):
        raise InvalidModel(f'{name}: metrics are functions by name, as in {{"accuracy": accuracy}}')
    if not isinstance(spec.inputs, tuple | list) or not all(isinstance(item, Field) for item in spec.fields):
        raise InvalidModel(f"{name}: inputs are a tuple of Field, and label is one Field")


def _check_names(spec: ModelSpec) -> None:
    names = [item.name for item in spec.fields]
    if len(set(names)) < len(names):
        raise InvalidModel(f"{spec.name}: the fields {', '.join(names)} need names of their own")
    for item in spec.fields:
        if item.dtype not in get_args(Dtype):
            raise InvalidModel(f"field {item.name!r} is {item.dtype}; there are {', '.join(get_args(Dtype))}")
    for name in ("examples", "loss"):
        if name in spec.metric_names:
            raise InvalidModel(f"{spec.name}: a metric is called {name!r}, which is always measured; rename it")


def _made(spec: ModelSpec) -> nn.Module:
    try:
        module = spec.make()
    except ExportError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise InvalidModel(f"{spec.name}: make() fails with {reason(error)}") from error
    if not isinstance(module, nn.Module):
        raise InvalidModel(f"{spec.name}: make() returns {type(module).__name__}, not a torch.nn.Module")
    return module


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    parameters = {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}
    return parameters | {name: value for name, value in module.named_buffers() if value.dtype in KEPT_BUFFERS}
