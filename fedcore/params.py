"""A model's schema: the place of each tensor in the flat float32 vector of parameters.

Spec: docs/spec/params.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.errors import SchemaError

Float32 = NDArray[np.float32]
Frozen: TypeAlias = NDArray[np.float32] | NDArray[np.uint8]
"""A vector that no round changes."""
FLOAT_BYTES = 4

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A length; decoding refuses a negative one."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One parameter tensor. Every parameter is float32; `shape` is empty for a scalar."""

    name: str
    shape: tuple[Size, ...]
    dtype: Literal["float32"] = "float32"

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class VectorSpec(msgspec.Struct, frozen=True):
    """A named flat float32 vector of `size` values; a scalar is a vector of size 1."""

    name: str
    size: Size


class FrozenVector(VectorSpec, frozen=True, omit_defaults=True):
    """A vector that no round changes. uint8: codes of weights in few bits, which graphs make numbers of."""

    dtype: Literal["float32", "uint8"] = "float32"


class ParamSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensors of a model in the order in which the flat vector concatenates them (row-major each).

    local: names of those that stay on a client; the values of the others alone are shared.
    """

    tensors: tuple[TensorSpec, ...]
    local: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise SchemaError(f"parameter names repeat: {sorted({n for n in names if names.count(n) > 1})}")
        unknown = sorted(set(self.local) - set(names))
        if unknown:
            raise SchemaError(f"local parameters that the schema does not have: {unknown}; there are {names}")
        if self.local and set(self.local) == set(names):
            raise SchemaError(f"all parameters are local, so nothing would be shared: leave one out, of {names}")

    @property
    def size(self) -> int:
        """D, the length of the flat vector."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the tensor list, in hex: equal digests mean interchangeable vectors."""
        return hashlib.sha256(msgspec.json.encode(self.tensors)).hexdigest()

    def slices(self) -> Iterable[tuple[TensorSpec, slice]]:
        """Each tensor with its range in the flat vector."""
        start = 0
        for tensor in self.tensors:
            yield tensor, slice(start, start + tensor.size)
            start += tensor.size

    @property
    def layers(self) -> tuple[slice, ...]:
        """The range of each tensor in the flat vector, in order."""
        return tuple(where for _, where in self.slices())

    @property
    def local_ranges(self) -> tuple[slice, ...]:
        """The ranges of the local tensors in the flat vector, in order."""
        return tuple(where for tensor, where in self.slices() if tensor.name in self.local)

    def flatten(self, tensors: Mapping[str, NDArray[np.generic]]) -> Float32:
        """Concatenate named tensors into one float32 (D,) vector.

        Raises SchemaError when a tensor is missing, unknown, of another shape or not float32.
        """
        unknown = sorted(set(tensors) - {tensor.name for tensor in self.tensors})
        if unknown:
            raise SchemaError(f"tensors that the schema does not name: {unknown}")
        flat = np.empty(self.size, np.float32)
        for spec, where in self.slices():
            if spec.name not in tensors:
                raise SchemaError(f"tensor {spec.name!r} is missing")
            value = tensors[spec.name]
            if value.shape != spec.shape or value.dtype != np.float32:
                raise SchemaError(
                    f"tensor {spec.name!r} is {value.dtype}{list(value.shape)}, "
                    f"the schema says float32{list(spec.shape)}"
                )
            flat[where] = value.reshape(-1)
        return flat

    def unflatten(self, vector: Float32) -> dict[str, Float32]:
        """Views of the vector's tensors by name. Raises SchemaError when the vector is not float32 (D,)."""
        if vector.shape != (self.size,) or vector.dtype != np.float32:
            raise SchemaError(f"vector is {vector.dtype}{list(vector.shape)}, the schema says float32[{self.size}]")
        return {spec.name: vector[where].reshape(spec.shape) for spec, where in self.slices()}
