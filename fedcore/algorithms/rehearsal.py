"""A rehearsal: every trip of an algorithm on tiny vectors, and on probes that know only operators.

The gradient is that of a bowl, Σ½(y − 1)², on batches of two examples; every pass takes two steps. Every metric of a
forward pass is the mean loss of the bowl. One device makes the whole cohort.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcore.algorithms import algorithm as contract
from fedcore.algorithms.clipped import Clipped, constants
from fedcore.algorithms.heavy_hitters import HeavyHitters
from fedcore.algorithms.local_training import AUTO, PartlyLocal
from fedcore.algorithms.question import Ask

# A probe: a vector that knows nothing but the operators of the contract, and says so when it is asked for more.
#
# It computes in NumPy. What a probe shares memory with can be made read-only, so that a write shows where it happens.

OPERATORS = "+ - * / // ** abs, comparisons, slices and .sum(-1)"
_NUMBERS = (bool, int, float, np.generic)
_UFUNCS = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.divide: operator.truediv,
    np.power: operator.pow,
}


_Function: TypeAlias = Callable[[Any, Any], Any]


class NotAnOperator(TypeError):
    """A vector was asked for more than the contract allows."""


def _refuse(what: str) -> NoReturn:
    raise NotAnOperator(f"{what} is no operator that every vector has; there are {OPERATORS}")


def _values(value: object) -> Any:
    if isinstance(value, Probe):
        return value.values
    if isinstance(value, _NUMBERS):
        return value
    _refuse(f"arithmetic with {type(value).__name__}")


def _sliced(where: object) -> Any:
    for part in where if isinstance(where, tuple) else (where,):
        if not isinstance(part, slice | int | type(None)) and part is not Ellipsis:
            _refuse(f"an index that is {type(part).__name__}")
    return where


def _apply(function: _Function, left: object, right: object) -> Probe:
    return Probe(function(_values(left), _values(right)))


def _binary(function: _Function) -> Callable[[Probe, object], Probe]:
    return lambda self, other: _apply(function, self, other)


def _reflected(function: _Function) -> Callable[[Probe, object], Probe]:
    return lambda self, other: _apply(function, other, self)


def _in_place(function: _Function) -> Callable[[Probe, object], Probe]:
    def apply(self: Probe, other: object) -> Probe:
        self.values = function(self.values, _values(other))
        return self

    return apply


class Probe:
    """A vector `(D,)`, or `(K, D)` of K devices."""

    __hash__ = None  # type: ignore[assignment]  # == compares values, as that of every vector
    __add__, __radd__, __iadd__ = _binary(operator.add), _reflected(operator.add), _in_place(operator.iadd)
    __sub__, __rsub__, __isub__ = _binary(operator.sub), _reflected(operator.sub), _in_place(operator.isub)
    __mul__, __rmul__, __imul__ = _binary(operator.mul), _reflected(operator.mul), _in_place(operator.imul)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __truediv__, __rtruediv__, __itruediv__ = (
        _binary(operator.truediv),
        _reflected(operator.truediv),
        _in_place(operator.itruediv),
    )
    __pow__, __rpow__, __ipow__ = _binary(operator.pow), _reflected(operator.pow), _in_place(operator.ipow)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __eq__ = _binary(operator.eq)  # type: ignore[assignment]
    __ne__ = _binary(operator.ne)  # type: ignore[assignment]

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = np.asarray(values)

    def sealed(self) -> Probe:
        """A view of the same values that cannot be written into."""
        view = self.values.view()
        view.flags.writeable = False
        return Probe(view)

    def sum(self, axis: int | None = None, *, keepdims: bool = False) -> Probe:
        """The sum over the last axis, and no other."""
        if axis != -1:
            _refuse(".sum() over all axes, or another than the last,")
        return Probe(self.values.sum(-1, keepdims=keepdims))

    def repeat(self, count: int) -> Probe:
        """A vector of `count` equal values, from one of size 1: what `constants` needs."""
        if self.values.shape != (1,):
            _refuse(".repeat() of more than one value")
        return Probe(self.values.repeat(count))

    def __getitem__(self, where: object) -> Probe:
        return Probe(self.values[_sliced(where)])

    def __setitem__(self, where: object, value: object) -> None:
        self.values[_sliced(where)] = _values(value)

    def __neg__(self) -> Probe:
        return Probe(-self.values)

    def __pos__(self) -> Probe:
        return Probe(+self.values)

    def __abs__(self) -> Probe:
        return Probe(abs(self.values))

    def __bool__(self) -> bool:  # noqa: PLE0304  # it never returns
        _refuse("a branch on its values (if, and, or, not, max, min)")

    def __float__(self) -> NoReturn:
        _refuse("float(…), or a function of the module math")

    def __iter__(self) -> NoReturn:
        _refuse("a loop over its values")

    def __len__(self) -> int:  # noqa: PLE0303  # it never returns
        _refuse("len(…)")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        _refuse("a conversion to a NumPy array")

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **_: object) -> Probe:
        """Refuse functions of NumPy; only its scalars come this way when they stand left of an operator."""
        if function in _UFUNCS and method == "__call__" and isinstance(inputs[0], np.generic):
            return _apply(_UFUNCS[function], *inputs)
        _refuse(f"np.{function.__name__}")

    def __array_function__(self, function: Any, *_: object) -> NoReturn:
        _refuse(f"np.{function.__name__}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: object) -> NoReturn:
        """Refuse functions of torch."""
        _refuse(f"torch.{getattr(function, '__name__', function)}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # what protocols of other libraries look for
        _refuse(f".{name}")


Call: TypeAlias = Callable[..., dict[str, contract.Vector]]
"""call(what, function, *arguments) gives function(*arguments); `what` names the function for a message."""

STEPS = 2


class Oracles(Protocol):
    """What passes of a rehearsal learn from examples: the gradient, by a call, and the sums of metrics."""

    def __call__(self, params: contract.Vector) -> tuple[contract.Vector, contract.Vector, contract.Vector]:
        """The gradient oracle of the contract."""

    def measure(self, metrics: int) -> contract.Measure:
        """The oracle of a forward pass, of sums of the examples and of so many metrics."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One trip: the server state before it, what went to a device, what came back, and the server state after it."""

    before: contract.State
    broadcast: contract.Broadcast
    report: contract.Report
    after: contract.State


@dataclass(frozen=True, slots=True)
class Bowl:
    """The oracles of a bowl with its minimum at `centre`. like: a vector of the kind and type of the model's."""

    like: contract.Vector
    centre: Any = 1.0

    def __call__(self, params: contract.Vector) -> tuple[contract.Vector, contract.Vector, contract.Vector]:
        """The gradient oracle: mean loss, gradient and number of examples."""
        one = 0.0 * params[..., :1] + 1.0
        return one, params - self.centre, 2.0 * one

    def measure(self, metrics: int) -> contract.Measure:
        """The oracle of a forward pass over a model with so many metrics."""
        examples = constants(self.like, [2.0, *[0.0] * metrics])
        losses = constants(self.like, [0.0, *[1.0] * metrics])
        return lambda params: examples + losses * ((params - self.centre) ** 2).sum(-1)[..., None]


def plainly(
    what: str, function: Callable[..., dict[str, contract.Vector]], *arguments: Any
) -> dict[str, contract.Vector]:
    """The call itself, without any look at what goes in or comes out."""
    return function(*arguments)


def rehearse(
    algorithm: contract.Algorithm, params_D: contract.Vector, oracles: Oracles | None = None, call: Call = plainly
) -> list[Rehearsed]:
    """Every trip, in order, from `params_D`; `oracles` are by default those of the bowl."""
    state, rehearsed, oracles = call("init", algorithm.init, params_D), [], oracles or Bowl(params_D)
    for trip in contract.trips_of(algorithm):
        broadcast = call("broadcast", trip.broadcast, state)
        report = contribute(trip, received(algorithm, broadcast, call), oracles, call)
        after = call("update", trip.update, state, report, contract.ServerStep())
        rehearsed.append(Rehearsed(state, broadcast, report, after))
        state = after
    return rehearsed


def moves_by_participation(algorithm: contract.Algorithm) -> bool:
    """Whether the state moves by the share of all clients that a round counts (`ServerStep.participation`)."""
    algorithm = for_any_model(algorithm)

    def moved(share: float) -> list[contract.State]:
        pairs = zip(contract.trips_of(algorithm), rehearse(algorithm, np.linspace(-1.0, 1.0, 5)), strict=True)
        return [trip.update(one.before, one.report, contract.ServerStep(participation=share)) for trip, one in pairs]

    with np.errstate(all="ignore"):
        pairs = zip(moved(1.0), moved(0.5), strict=True)
        return any(
            not np.array_equal(vector, half[name], equal_nan=True)
            for whole, half in pairs
            for name, vector in whole.items()
        )


def for_any_model(algorithm: contract.Algorithm) -> contract.Algorithm:
    """The algorithm with settings that suit a model of any size, such as the small ones of rehearsals."""
    if isinstance(algorithm, Clipped):
        return replace(algorithm, inner=for_any_model(algorithm.inner))
    if isinstance(algorithm, PartlyLocal):
        return replace(algorithm, local=AUTO)
    if isinstance(algorithm, HeavyHitters):
        return replace(algorithm, letters=0, bits=1, candidates=1, step_bits=1)
    return replace(algorithm, question=AUTO) if isinstance(algorithm, Ask) else algorithm


def received(algorithm: Any, broadcast: contract.Broadcast, call: Call = plainly) -> contract.Broadcast:
    """What a device's passes get: the broadcast, and in front of round 0 what a client keeps, where it keeps any."""
    if not hasattr(algorithm, "init_client"):
        return broadcast
    return {**broadcast, **call("init_client", algorithm.init_client, broadcast["params"])}


def contribute(
    trip: contract.Trip,
    broadcast: contract.Broadcast,
    oracles: Oracles,
    call: Call = plainly,
    spread: Callable[[Mapping[str, contract.Vector]], contract.Carry] = dict,
) -> contract.Report:
    """The report of a device in one trip. `spread` is done to the first carry of every pass."""
    return call("report", trip.report, broadcast, carried(trip, broadcast, oracles, call, spread))


def carried(
    trip: contract.Trip,
    broadcast: contract.Broadcast,
    oracles: Oracles,
    call: Call = plainly,
    spread: Callable[[Mapping[str, contract.Vector]], contract.Carry] = dict,
) -> dict[str, contract.Carry]:
    """The last carry of every pass of a trip, by name."""
    carries: dict[str, contract.Carry] = {}
    for stage in trip.passes:
        known = contract.with_carries(broadcast, carries)
        carry = spread(call(f"begin of pass {stage.name}", stage.begin, known))
        oracle: contract.Gradient | contract.Measure = (
            oracles.measure(len(stage.measures)) if stage.forward else oracles
        )
        for _ in range(STEPS):
            carry = call(f"step of pass {stage.name}", stage.step, carry, known, oracle)
        carries[stage.name] = carry
    return carries
