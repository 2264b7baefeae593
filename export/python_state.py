"""The Python side of a model: what it draws from generators, reads from clocks, and keeps between two calls.

Graphs and recorded steps contain none of it: its value at their creation would stay forever.
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
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.layers import Layers
from export.model import Model

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
