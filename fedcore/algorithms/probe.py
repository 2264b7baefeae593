"""A probe: a vector that knows nothing but the operators of the contract, and says so when it is asked for more.

It computes in NumPy. What a probe shares memory with can be made read-only, so that a write shows where it happens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
