"""The purity of a model: its loss of an example depends on nothing else, Python's own state included.

Graphs and recorded steps contain a model's operators and run none of its Python, and batches are padded. So both are
compared on a few examples with plain torch: the unmodified module, with weights in its own parameters. Shapes: B batch,
D parameters, M metric sums.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import inspect
import itertools
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from export.errors import ImpureModel
from export.layers import Layers
from export.model import GradientOracle, Model

# The Python side of a model: what it draws from generators, reads from clocks, and keeps between two calls.
#
# Graphs and recorded steps contain none of it: its value at their creation would stay forever.

Note = Callable[[str], None]
PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
NUMPY = "numpy.random"
"""The name of NumPy's own generator among the kept state: its calls cannot be observed, its state can."""
LIBRARIES = ("torch", "numpy", "logging")
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
SKIPPED = (type, types.ModuleType, types.FunctionType, nn.Module, torch.Tensor)
LONGEST = 10_000
"""A container of more values is data, and is skipped."""


@contextlib.contextmanager
def watched(module: nn.Module) -> Iterator[list[str]]:
    """Watch a block that runs the module. Yields its calls that draw numbers or read a clock, with their layers.

    If a profiler is already active, only torch's own draws are noticed. No garbage is collected in the block, because
    callbacks of the collector may read a clock.
    """
    layers, calls, profiler, collecting = Layers(module), list[str](), sys.getprofile(), gc.isenabled()

    def note(what: str) -> None:
        calls.append(what + layers.here)

    try:
        with layers.watch(), _Draws(note):
            gc.disable()
            sys.setprofile(profiler or _profile(note))
            yield calls
    finally:
        sys.setprofile(profiler)
        if collecting:
            gc.enable()


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that draw from torch's generator, except some that are marked so but draw nothing."""

    def __init__(self, note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own hook: without it torch's compiler is loaded, which takes seconds and is not used."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            self._note(str(func))
        return result


def _profile(note: Note) -> Callable[[types.FrameType, str, Any], None]:
    """A profile function. Python reports calls of C functions whatever name they are called by."""

    def told(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (what := _outside(function)):
            imported = frame.f_code.co_name == "<module>"  # a module that a first call imports
            if not imported and not _logs(frame):
                note(what)

    return told


def _logs(frame: types.FrameType | None) -> bool:
    """Whether a call happens inside logging, whose handlers and formatters may be foreign."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "logging":
            return True
        frame = frame.f_back
    return False


def _outside(function: Any) -> str:
    """A function's name if it draws a number or reads a clock, else nothing."""
    owner, name, module = (getattr(function, key, None) for key in ("__self__", "__name__", "__module__"))
    if isinstance(owner, random.Random) and name in {"random", "getrandbits"}:
        return f"random.{name}"
    if isinstance(owner, type) and issubclass(owner, datetime.date) and name in {"now", "utcnow", "today"}:
        return f"datetime.{name}"
    if (module == "time" and name != "sleep") or (module == os.urandom.__module__ and name == "urandom"):
        return f"{'os' if name == 'urandom' else module}.{name}"
    return ""


def kept(model: Model) -> dict[str, list[str]]:
    """The state of a model besides its parameters, in comparable form by name, as far as it can be found.

    These are buffers, attributes of layers, their classes and the loss, the state of NumPy's own generator, and the
    outer variables that forward, loss and metrics read. Tensors in attributes are left out: usually forward has just
    computed them.
    """
    spec = model.spec
    fingerprints = {NUMPY: list(_leaves(mtrand.get_bit_generator().state, set()))}
    for name, buffer in model.module.named_buffers():
        fingerprints[f"the buffer {name!r}"] = [_digest(buffer.reshape(-1).view(torch.uint8).numpy())]
    layers = {f"layer {path!r}" if path else "the model": layer for path, layer in model.module.named_modules()}
    kinds = {type(layer) for layer in layers.values()}
    losses = {"the loss": spec.loss} | {f"the metric {name!r}": metric for name, metric in spec.metrics.items()}
    holders = layers | losses | {f"class {kind.__name__}": kind for kind in kinds}
    for owner, holder in holders.items():
        for name, value in vars(_holder(holder)).items():
            if name not in _OF_EVERY_LAYER:
                fingerprints[f"the attribute {name!r} of {owner}"] = list(_leaves(value, set()))
    functions, seen = [kind.forward for kind in kinds] + list(losses.values()), set()
    functions += [value for layer in layers.values() for value in vars(layer).values()]
    while functions:
        function = functions.pop()
        if id(function) not in seen:
            seen.add(id(function))
            for name, value in _outer_variables(function).items():
                fingerprints[f"the variable {name!r}"] = list(_leaves(value, set()))
                functions.append(value)
    return fingerprints


_OF_EVERY_LAYER = vars(nn.Module()).keys() - {"training"}


def _holder(thing: Any) -> Any:
    """The mapping that holds the attributes of a layer, a class or a function."""
    thing = thing.__self__ if inspect.ismethod(thing) else thing
    return thing if hasattr(thing, "__dict__") else types.SimpleNamespace()


def _outer_variables(function: Any) -> Mapping[str, Any]:
    """The outer variables that a user's function reads; empty for anything else."""
    if not (inspect.isfunction(function) or inspect.ismethod(function)) or _is_of(function, *LIBRARIES):
        return {}
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a function around it has not set all of them yet
        return {}
    return {**variables.globals, **variables.nonlocals}


def _is_of(thing: Any, *packages: str) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in packages


def _leaves(value: Any, seen: set[int]) -> Iterator[str]:
    """The plain values within a value, and the states of generators, as text."""
    if isinstance(value, PLAIN):
        yield repr(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield _digest(value)
    elif id(value) not in seen and not isinstance(value, SKIPPED):
        seen.add(id(value))
        for part in _parts(value):
            yield from _leaves(part, seen)


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a value; empty if it is too long or belongs to a library."""
    if isinstance(value, GENERATORS):
        return [_state(value)]
    if isinstance(value, Mapping | Sequence | Set):
        whole = itertools.chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        return whole if len(value) <= LONGEST else ()
    return vars(value).values() if hasattr(value, "__dict__") and not _is_of(value, *LIBRARIES) else ()


def _state(generator: Any) -> Any:
    """The state of a generator of random numbers."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    legacy = isinstance(generator, np.random.RandomState)
    return generator.get_state(legacy=False) if legacy else generator.bit_generator.state


def _digest(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def drawn() -> str:
    """The states of Python's own generator and of NumPy's, as text."""
    return "".join(_leaves([random.getstate(), mtrand.get_bit_generator().state], set()))


REAL, EXAMPLES = 3, 5
"""The examples of a trial that the mask keeps, and all of them."""
# The allowed distance of a gradient from plain torch's, or as a multiple of the effect of rounding the parameters.
TOLERANCE, OWN_TIMES = 1e-4, 5
ROUND_OFF, TINY = float(np.finfo(np.float32).eps), 1e-30
# The number of points tried before a model is refused, their distance, and the length of a step, relative to the model.
POINTS, NEAR, STEP = 4, 1e-3, 1e-2
ONCE = "graphs and recorded steps run none of a model's Python, so that would happen once and never again"
LEAVE = "Leave it out of forward, loss and metrics: only parameters are kept from one step to the next"
DRAW = "Draw by nn.Dropout, randn_like or rand_like, which draw anew in every step"


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch: fields (B, …), mask float32 (B,), noise int32 (B,)."""

    fields: Mapping[str, Tensor]
    mask: Tensor
    noise: Tensor

    @classmethod
    def of(cls, examples: Mapping[str, np.ndarray], count: int) -> Sample:
        """A copy of the first `count` of EXAMPLES examples, of which the last are padding."""
        numbers = torch.arange(count, dtype=torch.int32)
        fields = {name: torch.tensor(values[:count]) for name, values in examples.items()}
        return cls(fields, (numbers < REAL).float(), numbers * 0x2545F491)


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a batch. sums: (M,), of the metrics. gradient: (D,), of the loss."""

    sums: Tensor
    gradient: Tensor


Gradient = Callable[[Model, Tensor, Sample], Found]
"""The function to compare with plain torch, at parameters (D,)."""


def of_oracle(model: Model, params_D: Tensor, sample: Sample) -> Found:
    """The result of the gradient oracle, which the exporter traces."""
    oracle = GradientOracle(model, sample.fields, sample.mask, sample.noise)
    gradient_D = oracle(params_D)[1]
    return Found(oracle.sums, gradient_D)


def check_pure(model: Model, examples: Mapping[str, np.ndarray], gradient: Gradient = of_oracle) -> None:
    """Compare a padded batch with its real examples in plain torch, and again at parameters one step further.

    examples: EXAMPLES of them, every field. A gradient that is not finite on them passes; other checks notice it.
    Raises ImpureModel, naming the cause, and whatever the user's own code raises.
    """
    trial = _Trial(model, examples, gradient)
    params_D = torch.from_numpy(model.initial)
    first = trial.called_twice(params_D)
    if not first.gradient.isfinite().all():
        return
    trial.hold(params_D, first)
    further_D = params_D - STEP * _as_long(first.gradient, params_D)
    trial.hold(further_D, trial.plain(further_D))


@dataclass(frozen=True, slots=True)
class _Trial:
    """Examples for a model, and the function to compare with plain torch on them."""

    model: Model
    examples: Mapping[str, np.ndarray]
    gradient: Gradient

    @property
    def name(self) -> str:
        return self.model.spec.name

    def plain(self, params_D: Tensor) -> Found:
        """The results of the plain module on the real examples. Raises ImpureModel if it changes its parameters."""
        own = {name: value for name, value in self.model.module.named_parameters() if value.requires_grad}
        sample, values = Sample.of(self.examples, REAL), self.model.tensors(params_D)
        with _set(own, values):
            loss, sums_M = self.model.loss({}, sample.fields, sample.mask, sample.noise)
            gradients = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
            changed = [name for name, value in values.items() if not torch.equal(own[name], value)]
        if changed:
            raise ImpureModel(f"{self.name} changes the parameter {changed[0]!r} by itself; leave that to training")
        return Found(sums_M, torch.cat([gradient.reshape(-1) for gradient in gradients]))

    def called_twice(self, params_D: Tensor) -> Found:
        """Results of plain torch. Raises ImpureModel if Python draws or keeps anything, or a second call differs."""
        with watched(self.model.module) as called:
            first, before = self.plain(params_D), kept(self.model)
            again, after = self.plain(params_D), kept(self.model)
        called += [NUMPY] if before[NUMPY] != after[NUMPY] else []
        if called:
            timed = called[0].startswith(("time", "datetime"))
            raise ImpureModel(f"{self.name} calls {called[0]}; {ONCE}. {LEAVE if timed else DRAW}")
        moved = [what for what, values in before.items() if after.get(what) != values]
        if moved:
            raise ImpureModel(f"{self.name} changes {moved[0]} in every call; {ONCE}. {LEAVE}")
        if max(self._apart(again, first).values()) > TOLERANCE:
            raise ImpureModel(
                f"{self.name} gives another loss or gradient when it is called again with the same examples and "
                f"parameters, so it counts, keeps or draws something; {ONCE}. {LEAVE}"
            )
        return first

    def hold(self, params_D: Tensor, expected: Found) -> None:
        """Raise ImpureModel unless a padded batch gives the expected results, there or at nearby points.

        The gradient jumps where rounding flips a ReLU, but seldom at several points in a row.
        """
        random, point_D = torch.Generator().manual_seed(0), params_D
        for _ in range(POINTS):
            apart = max(self._padded_apart(point_D, expected, EXAMPLES).values())
            if apart <= TOLERANCE or apart <= OWN_TIMES * self._own_apart(point_D, expected, random):
                return
            point_D = params_D + NEAR * _as_long(torch.randn(params_D.shape, generator=random), params_D)
            expected = self.plain(point_D)
        alone = self._padded_apart(point_D, expected, REAL)
        wrong = [part for part, difference in alone.items() if difference > TOLERANCE]
        raise ImpureModel(f"{self.name}: {_held(wrong) if wrong else _mixed(self.model, self.examples)}")

    def _padded_apart(self, params_D: Tensor, expected: Found, examples: int) -> dict[str, float]:
        actual = self.gradient(self.model, params_D, Sample.of(self.examples, examples))
        return self._apart(actual, expected)

    def _own_apart(self, params_D: Tensor, expected: Found, random: torch.Generator) -> float:
        """The effect on plain torch of rounding the parameters."""
        rounded_D = params_D * (1 + ROUND_OFF * torch.randint(-1, 2, params_D.shape, generator=random))
        return max(self._apart(self.plain(rounded_D), expected).values())

    def _apart(self, actual: Found, expected: Found) -> dict[str, float]:
        """The relative error of each tensor's gradient, and as "" that of the worst metric sum.

        The gradient of a tensor may be zero up to rounding, so the denominator adds a hundredth of the whole gradient.
        """
        sizes_M = expected.sums.abs() + 0.01 * REAL
        apart = {"": max(map(_off, actual.sums, expected.sums, sizes_M))}
        whole, of_found = expected.gradient.norm(), self.model.tensors(actual.gradient)
        for name, gradient in self.model.tensors(expected.gradient).items():
            apart[name] = _off(of_found[name], gradient, gradient.norm() + 0.01 * whole)
        return apart


def _off(actual: Tensor, expected: Tensor, size: Tensor) -> float:
    """The difference over a size; 0 if the expected value is not a number."""
    if not expected.isfinite().all():
        return 0.0
    difference = (actual - expected).norm().item()
    return difference / max(size.item(), TINY) if np.isfinite(difference) else np.inf


def _as_long(direction_D: Tensor, params_D: Tensor) -> Tensor:
    """A direction, as long as the parameters, or of length 1 where they are shorter."""
    length: Tensor = params_D.norm().clamp(min=1) / direction_D.norm().clamp(min=TINY)
    return direction_D * length


@contextlib.contextmanager
def _set(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Change the values of parameters in place during the block, so that every reference to one sees them."""
    before = {name: value.detach().clone() for name, value in own.items()}
    try:
        _copy(own, values)
        yield
    finally:
        _copy(own, before)


def _copy(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def _held(wrong: list[str]) -> str:
    """The message about parameters that are read outside the module. wrong: parameters with wrong gradients."""
    which = next((f"the parameter {name!r}" for name in wrong if name), "a parameter")
    return (
        f"the loss or forward holds on to {which} outside of its layer, as in a variable or a list, and does not see "
        "it change in training. Read parameters in forward, as attributes of layers; if that is so, please report it"
    )


def _mixed(model: Model, examples: Mapping[str, np.ndarray]) -> str:
    """The message about examples that influence each other: where, and what to do."""
    return (
        f"{_mixer(model, examples)} lets the examples of a batch influence each other, as by a mean over the batch, "
        "negatives from it, or a branch on its values; padding would count. Make the loss of an example from that "
        "example alone: group normalisation instead of statistics of the batch, torch.where instead of a branch. A "
        "loss that compares examples takes the mask: ModelSpec(compares=True)"
    )


def _mixer(model: Model, examples: Mapping[str, np.ndarray]) -> str:
    """The layer, loss or metric whose values for the same examples change when other examples join the batch."""
    with torch.no_grad():
        (among, metrics), (alone, expected) = (_calls(model, Sample.of(examples, count)) for count in (EXAMPLES, REAL))
    for (path, *ours), (_, *theirs) in zip(among, alone, strict=False):
        same_input, same_output = (_same_rows(*pair) for pair in zip(ours, theirs, strict=True))
        if not same_output:
            # If the inputs differ already, the surrounding layer has mixed them.
            where = path if same_input else path.rpartition(".")[0]
            return f"layer {where!r}" if where else "the model's own forward"
    metric = next((name for name, values in metrics.items() if not _same_rows(values, expected[name])), "loss")
    return "the loss" if metric == "loss" else f"the metric {metric!r}"


def _calls(model: Model, sample: Sample) -> tuple[list[tuple[str, Any, Any]], dict[Any, Tensor]]:
    """The calls of layers in the order of their ends (path, inputs, outputs), and loss and metrics by example."""
    calls: list[tuple[str, Any, Any]] = []
    with contextlib.ExitStack() as hooks:
        for path, layer in model.module.named_modules():
            hook = layer.register_forward_hook(
                lambda layer, inputs, outputs, path=path: calls.append((path, inputs, outputs))
            )
            hooks.callback(hook.remove)
        return calls, model.measure({}, sample.fields, sample.mask, sample.noise)


def _same_rows(among: Any, alone: Any) -> bool:
    """Whether values have equal rows for the real examples; true if they have no such rows."""
    for ours, theirs in zip(tree_leaves(among), tree_leaves(alone), strict=False):
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape == (EXAMPLES, *theirs.shape[1:]):
            rows = ours[: len(theirs)]
            if not torch.allclose(rows, theirs, 1e-4, 1e-5, equal_nan=True):
                return False
    return True
