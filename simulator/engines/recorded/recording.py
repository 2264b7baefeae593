"""Recordings: the operators that a function of tensors ran, to run again on other values, and the trial.

Torch's work around operators, such as differentiation, vectorisation over clients and views, is done once, when the
function is recorded. A tensor is described by its memory, a *buffer*, and its layout there. So a view is no longer an
operator, and an operator that writes in place is like every other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from export.purity import drawn
from simulator.errors import EngineError

# The trial of a program: its first run, compared with the function, from the same random state.
#
# A fault in a recording makes a program read unwritten or wrong memory. The first shows as NaN, because the workspace
# is filled with it before; the second differs by about the size of the values. Rounding is a thousand times below the
# tolerance.


class RandomState:
    """The state at the creation of this object."""

    def __init__(self) -> None:
        self._cpu, self._drawn = torch.get_rng_state(), drawn()
        initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpus = torch.cuda.get_rng_state_all() if initialised else []

    def put_back(self) -> None:
        """Let torch repeat the numbers that it has drawn since."""
        torch.set_rng_state(self._cpu)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)

    @property
    def drawn_elsewhere(self) -> bool:
        """Whether Python or NumPy has drawn numbers since."""
        return drawn() != self._drawn


# The allowed distance between a program's and its function's values, relative to the largest value, and absolute.
CLOSE, TINY = 1e-4, 1e-6


class Before:
    """The memory and torch's random state before a trial."""

    def __init__(self, memory: Iterable[torch.UntypedStorage]) -> None:
        distinct = {storage._cdata: storage for storage in memory}
        self._memory = [
            (storage, storage.clone())  # type: ignore[no-untyped-call]
            for storage in distinct.values()
        ]
        self._random = RandomState()

    def put_back(self) -> None:
        """Restore everything."""
        for storage, before in self._memory:
            storage.copy_(before)
        self._random.put_back()

    def same_around(self, targets: Iterable[Tensor]) -> bool:
        """Whether a program that wrote to targets left the rest of their memory unchanged."""
        before = {storage._cdata: copy.clone() for storage, copy in self._memory}
        targets = list(targets)
        for target in targets:
            storage = target.untyped_storage()
            there = target.new_empty(0).set_(
                before[storage._cdata], int(target.storage_offset()), target.shape, target.stride()
            )
            there.copy_(target)
        memory = (target.untyped_storage() for target in targets)
        return all(torch.equal(_bytes(storage), _bytes(before[storage._cdata])) for storage in memory)


def agree(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether outputs equal those of the recording, up to rounding."""
    return actual.keys() == wanted.keys() and all(_close(actual[name], tensor) for name, tensor in wanted.items())


def _close(actual: Tensor, wanted: Tensor) -> bool:
    if (actual.shape, actual.dtype) != (wanted.shape, wanted.dtype):
        return False
    if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
        return torch.equal(actual, wanted)
    finite = wanted.isfinite()
    actual, wanted = actual[finite], wanted[finite]
    # NaN is not below anything.
    return not len(wanted) or bool(((actual - wanted).abs() <= CLOSE * wanted.abs().max() + TINY).all())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# Recordings: the operators that a function of tensors ran, to run again on other values of the same shapes.


aten = torch.ops.aten
# Operators, and equivalent ones that can write into existing memory.
SAME = {aten.mul.Scalar: aten.mul.Tensor, aten.div.Scalar: aten.div.Tensor}
# Methods that expose a tensor's values.
READINGS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
POOLED_BACKWARD = aten.max_pool2d_with_indices_backward.default
# Operators that read the shape of a tensor and not its values.
SHAPED = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a buffer: the layout of a tensor there, in elements of its dtype."""

    buffer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor at this place in some memory."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True)
class Call:
    """A call of an operator. Tensors among the arguments and results are places; results are those in new buffers."""

    operator: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Place | None]
    one_result: bool = True

    @property
    def read(self) -> set[int]:
        """The buffers of its arguments."""
        return {place.buffer for place in places((self.args, self.kwargs))}

    @property
    def written(self) -> set[int]:
        """The buffers of arguments that it writes to."""
        return _written(self.operator, self.args, self.kwargs)

    @property
    def touched(self) -> set[int]:
        """Every buffer that it reads or writes."""
        return self.read | self.written | self.made

    @property
    def made(self) -> set[int]:
        """The buffers of its results."""
        return {place.buffer for place in self.results if place is not None}


def places(tree: Any) -> Iterator[Place]:
    """The places in arguments, which are lists, tuples and dictionaries of them and of other values.

    It is plain recursion, as torch's own walk through such trees takes longer than all else of a recording.
    """
    if isinstance(tree, Place):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from places(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from places(item)


def mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Arguments with `function` of each value of a kind instead of it."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(kind, function, item) for item in tree)
    if isinstance(tree, dict):
        return {name: mapped(kind, function, item) for name, item in tree.items()}
    return tree


@functools.cache
def _writes(operator: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """The place and the name of each argument that an operator writes to; none if it only changes a tensor's layout, as
    `transpose_` does."""
    if torch.Tag.inplace_view in operator.tags:
        return ()
    schema = enumerate(operator._schema.arguments)
    return tuple((index, item.name) for index, item in schema if item.alias_info and item.alias_info.is_write)


def _written(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """The buffers that an operator writes to."""
    given = [args[index] if index < len(args) else kwargs.get(name) for index, name in _writes(operator)]
    return {place.buffer for place in places(given)}


@dataclass(slots=True)
class Recording:
    """The calls of a function, in order. It is mutable.

    external: the memory that is there before the first call: arguments and constants. nbytes: the size of every other
    buffer. outputs: where the function's results are, by name. expected: what they were when it was recorded.
    """

    calls: list[Call]
    external: dict[int, torch.UntypedStorage]
    nbytes: dict[int, int]
    outputs: dict[str, Place]
    expected: dict[str, Tensor]

    @property
    def written(self) -> set[int]:
        """The buffers that calls write to."""
        return {buffer for call in self.calls for buffer in call.written}

    @property
    def overwritten(self) -> list[torch.UntypedStorage]:
        """The memory of `external` that calls write to."""
        written = self.written
        return [storage for buffer, storage in self.external.items() if buffer in written]

    def like(self, place: Place) -> Place:
        """A place in a new buffer, with the layout of another place."""
        buffer = self._next()
        self.nbytes[buffer] = self.nbytes[place.buffer]
        return replace(place, buffer=buffer)

    def new(self, size: tuple[int, ...]) -> Place:
        """A place that fills a new buffer, row-major, in float32."""
        buffer = self._next()
        self.nbytes[buffer] = math.prod(size) * torch.float32.itemsize
        return _place(torch.empty(size, device="meta"), buffer)

    def constant(self, tensor: Tensor) -> Place:
        """The place of a tensor whose values are always the same."""
        buffer = self._next()
        self.external[buffer] = tensor.untyped_storage()
        return _place(tensor, buffer)

    def _next(self) -> int:
        return max(self.external.keys() | self.nbytes.keys()) + 1

    def move(self, buffer: int, moved: Callable[[Place], Place], users: Iterable[Call] | None = None) -> None:
        """Move all places in a buffer elsewhere. users: the calls that touch it, if known."""

        def at(place: Place) -> Place:
            return moved(place) if place.buffer == buffer else place

        for call in self.calls if users is None else users:
            call.args, call.kwargs, call.results = mapped(Place, at, (call.args, call.kwargs, call.results))
        self.outputs = {name: at(place) for name, place in self.outputs.items()}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator as it runs, as later ones may change its tensors' layout in place."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes, self.calls = notes, list[Call]()
        self.refused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own hook: without it, each process loads torch's compiler, which takes seconds and is not used."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is POOLED_BACKWARD and args[1].is_contiguous(memory_format=torch.channels_last):
            # With channels in front here, it would turn its result round and back, which is larger.
            args = (self._note(aten.clone.default, args[:1], {"memory_format": torch.channels_last}), *args[1:])
        return self._note(func, args, kwargs or {})

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        placed_args, placed_kwargs = mapped(Tensor, self._notes.place, (args, kwargs))
        self._notes.keep(_written(func, placed_args, placed_kwargs))
        result = func(*args, **kwargs)
        if _shaped_by_values(func, args) or not _all_tensors(result):
            self.refused = True  # as the model must not see an error
        elif call := self._notes.call(func, placed_args, placed_kwargs, result):
            self.calls.append(call)
        return result


class _Readings(TorchFunctionMode):
    """Notices values that are read by Python or NumPy without an operator; `item` is one."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in READINGS:
            self._recorder.refused = True
        return func(*args, **(kwargs or {}))


class NotRecordable(Exception):
    """A function reads values of tensors as numbers, or makes shapes from values, so its operators may change."""


def record(function: Callable[[], Mapping[str, Tensor]], arguments: Iterable[Tensor]) -> Recording:
    """Run a function and record its operators. Afterwards its arguments and torch's random state are restored.

    arguments: the tensors whose values may differ in the next run; everything else that it reads is a constant.
    Raises NotRecordable, and EngineError if Python or NumPy draw random numbers.
    """
    notes, random = _Notes(arguments), RandomState()
    try:
        with _Recorder(notes) as recorder, _Readings(recorder):
            outputs = function()
        values = {name: tensor.clone() for name, tensor in outputs.items()}
    finally:
        notes.put_back()
        random.put_back()
    if random.drawn_elsewhere:
        raise EngineError(
            "the model or the algorithm draws by Python's random or by numpy.random, which a recorded step would do "
            "once and never again; draw by nn.Dropout, randn_like or rand_like"
        )
    if recorder.refused:
        raise NotRecordable
    results = {name: notes.place(tensor) for name, tensor in outputs.items()}
    recording = Recording(recorder.calls, notes.external, notes.nbytes, results, values)
    _fold_constants(recording, notes)
    _drop_unused(recording)
    _merge_scaled(recording)
    return recording


class _Notes:
    """Numbers for the memory of tensors. All of it is kept alive, so no address repeats."""

    def __init__(self, arguments: Iterable[Tensor]) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        self.external: dict[int, torch.UntypedStorage] = {}
        self.nbytes: dict[int, int] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self.arguments = {self.place(tensor).buffer for tensor in arguments}

    def place(self, tensor: Tensor) -> Place:
        """The place of a tensor. Memory that no call made is external."""
        storage = tensor.untyped_storage()
        number = self._number(storage)
        if number is None:
            number = self._add(storage)
            self.external[number] = storage
        return _place(tensor, number)

    def keep(self, buffers: Iterable[int]) -> None:
        """Copy external memory that is about to be written."""
        for buffer in (set(buffers) & self.external.keys()) - self._kept.keys():
            self._kept[buffer] = self.external[buffer].clone()  # type: ignore[no-untyped-call]

    def put_back(self) -> None:
        """Restore what the external memory held at first."""
        for buffer, before in self._kept.items():
            self.external[buffer].copy_(before)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Call | None:
        """A call with places as arguments; none where its results are views."""
        one_result = isinstance(result, Tensor)
        results = [self._made(tensor) for tensor in ([result] if one_result else result or ())]
        if func is aten.relu.default:  # as it cannot write into memory that is there
            func, args = aten.clamp_min.default, (*args, 0)
        call = Call(SAME.get(func, func), args, kwargs, results, one_result)
        return call if call.made or call.written else None

    def _made(self, result: Tensor | None) -> Place | None:
        if result is None or self._number(result.untyped_storage()) is not None:
            return None
        storage = result.untyped_storage()
        number = self._add(storage)
        self.nbytes[number] = storage.nbytes()
        return _place(result, number)

    def _number(self, storage: torch.UntypedStorage) -> int | None:
        return self._numbers.get(storage._cdata)

    def _add(self, storage: torch.UntypedStorage) -> int:
        self._numbers[storage._cdata] = len(self.storages)
        self.storages.append(storage)
        return len(self.storages) - 1


def _shaped_by_values(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the shape of the results depends on values, as with `nonzero`, or with masks as indices."""
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _all_tensors(results: Any) -> bool:
    if results is None or isinstance(results, Tensor):
        return True
    return isinstance(results, list | tuple) and all(result is None or isinstance(result, Tensor) for result in results)


def _place(tensor: Tensor, buffer: int) -> Place:
    return Place(buffer, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _fold_constants(recording: Recording, notes: _Notes) -> None:
    """Remove the calls whose results are always the same."""
    written = recording.written
    constant, calls = set(recording.external) - notes.arguments - written, []
    for call in recording.calls:
        is_random = torch.Tag.nondeterministic_seeded in call.operator.tags
        read = set() if call.operator in SHAPED else call.read
        if is_random or call.written or call.made & written or not read <= constant:
            calls.append(call)
            continue
        constant |= call.made
        recording.external |= {buffer: notes.storages[buffer] for buffer in call.made}
    recording.calls = calls


def _drop_unused(recording: Recording) -> None:
    """Remove the calls whose results are not read."""
    needed, calls = {place.buffer for place in recording.outputs.values()} | set(recording.external), []
    for call in reversed(recording.calls):
        if (call.made | call.written) & needed:
            needed |= call.read
            calls.append(call)
    recording.calls = calls[::-1]


def _merge_scaled(recording: Recording) -> None:
    """Merge a product with a number and the addition or subtraction of it into one call."""
    reads: dict[int, int] = {}
    for place in places([(call.args, call.kwargs) for call in recording.calls] + list(recording.outputs.values())):
        reads[place.buffer] = reads.get(place.buffer, 0) + 1
    written = recording.written
    scaled = (call for call in recording.calls if call.operator is aten.mul.Tensor and call.made)
    products = {
        place: call
        for call in scaled
        for place in call.results
        if place and isinstance(call.args[1], int | float) and place.dtype is call.args[0].dtype
    }
    merged = set()
    for call in recording.calls:
        if call.operator not in {aten.add.Tensor, aten.sub.Tensor} or call.kwargs:
            continue
        to, by = call.args
        if call.operator is aten.add.Tensor and to in products:
            to, by = by, to
        product = products.get(by) if isinstance(to, Place) else None
        if product is None or to.dtype is not by.dtype or reads[by.buffer] > 1 or product.read & written:
            continue
        call.args, call.kwargs = (to, product.args[0]), {"alpha": product.args[1]}
        merged.add(id(product))
    recording.calls = [call for call in recording.calls if id(call) not in merged]
