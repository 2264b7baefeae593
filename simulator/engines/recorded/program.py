"""Programs: recordings with memory for every buffer, run again, on GPUs as CUDA graphs.

Operators write into preallocated memory as far as they can, so a run allocates next to nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from simulator.engines.recorded.layout import lay_out_parts, may_lie_in, writer_of
from simulator.engines.recorded.recording import (
    Before,
    Call,
    NotRecordable,
    Place,
    Recording,
    agree,
    mapped,
    places,
    record,
)
from simulator.engines.recorded.rewrites import (
    accumulate,
    differentiate_by_winograd,
    multiply_by_onednn,
    sum_for_biases,
)

# CUDA graphs: runs of programs that a GPU keeps, and replays as one piece of work.
#
# A step of a small model is hundreds of kernels, and starting a kernel takes the CPU longer than running it takes the
# GPU. A graph starts all of them at once. It is for one number of clients, so steps use few different numbers.

log = logging.getLogger(__name__)

Run = Callable[[], dict[str, Tensor]]
"""Runs a program on the present values of its arguments, in memory that stays; returns its outputs by name."""
Capture = Callable[[Run], Run]
"""Turns a run, which it may call once without effect, into a faster one with the same effect on the same memory."""


class CudaGraphs:
    """Captures runs on one GPU. The graphs share memory, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """A replay of a run, or the run itself if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                outputs = run()
        except RuntimeError as error:
            log.warning("a step runs without a CUDA graph, and slower: %s", str(error).partition("\n")[0])
            return run

        def replay() -> dict[str, Tensor]:
            graph.replay()
            return dict(outputs)

        return replay


def padded(active: int, clients: int) -> int:
    """The number of clients that a step trains if `active` of `clients` have a batch left: at most a quarter more.

    There are four such numbers between a power of two and the next, so captured graphs are reused.
    """
    unit = 1 << max(0, active.bit_length() - 3)
    return min(-(-active // unit) * unit, clients)


aten = torch.ops.aten
T = TypeVar("T")


class Workspace:
    """Memory that programs share: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[Tensor] = []

    def spoil(self) -> None:
        """Fill with NaN, so that a read of unwritten memory shows."""
        for block in self._blocks:
            block.fill_(255)

    def reservation(self) -> _Reservation:
        """The use of the whole workspace by one program."""
        return _Reservation(self._blocks, self.device)


class _Reservation:
    def __init__(self, blocks: list[Tensor], device: torch.device) -> None:
        self._blocks, self._device, self._free = blocks, device, list(blocks)

    def take(self, nbytes: int) -> Tensor:
        """A block of at least `nbytes`; among equally large ones, the last used."""
        fitting = [block for block in self._free if nbytes <= block.numel() <= 2 * nbytes + 4096]
        if fitting:
            block = min(reversed(fitting), key=Tensor.numel)
            self._free = [other for other in self._free if other is not block]
            return block
        self._blocks.append(torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self._device))
        return self._blocks[-1]

    def give_back(self, block: Tensor) -> None:
        """Take a block back for others."""
        self._free.append(block)


class Program:
    """A recording that can be run.

    targets: tensors that are to receive outputs, by name. Outputs without one are in `outputs` until the next program
    runs.
    """

    def __init__(self, recording: Recording, workspace: Workspace, targets: Mapping[str, Tensor]) -> None:
        self._loose: dict[int, Tensor] = {}  # results of operators that allocate them
        self._steps: list[Callable[[], Any]] = []
        lay_out_parts(recording)
        accumulate(recording)
        if workspace.device.type == "cpu":
            multiply_by_onednn(recording)
            sum_for_biases(recording)
            differentiate_by_winograd(recording)
        self._memory = dict(recording.external)
        copies = self._aim(recording, targets)
        recording.calls = [call for call in recording.calls if not self._is_there(call)]
        self._plan(recording, workspace)
        self._copies = [(target, self._bound(place), place.buffer in recording.external) for target, place in copies]
        self._outputs = {name: self._bound(place) for name, place in recording.outputs.items() if name not in targets}

    def run(self) -> dict[str, Tensor]:
        """Run it on the present values of its arguments."""
        for step in self._steps:
            step()
        # An output that was not computed may be an argument whose memory another output will overwrite.
        found = [(target, self._now(bound), is_input) for target, bound, is_input in self._copies]
        copies = [(target, value.clone() if is_input else value) for target, value, is_input in found]
        for target, value in copies:
            target.copy_(value)
        outputs = {name: self._now(bound) for name, bound in self._outputs.items()}
        self._loose.clear()
        return outputs

    def _aim(self, recording: Recording, targets: Mapping[str, Tensor]) -> list[tuple[Tensor, Place]]:
        """Let results be written into their targets. Returns those that must be copied there."""
        copies = []
        for name, target in targets.items():
            place = recording.outputs[name]
            if place.buffer not in self._memory and may_lie_in(recording, place, target):
                recording.move(place.buffer, functools.partial(_shifted, int(target.storage_offset())))
                self._memory[place.buffer] = target.untyped_storage()
            else:
                copies.append((target, place))
        return copies

    def _plan(self, recording: Recording, workspace: Workspace) -> None:
        """Give every buffer memory for the time that it is needed, and bind the calls to it."""
        last = {buffer: index for index, call in enumerate(recording.calls) for buffer in call.touched}
        last |= {place.buffer: len(recording.calls) for place in recording.outputs.values()}
        loose = {buffer for call in recording.calls if writer_of(call) is None for buffer in call.made}
        reservation, blocks = workspace.reservation(), dict[int, Tensor]()
        for index, call in enumerate(recording.calls):
            # Not a difference of sets, which would iterate over all of `_memory`.
            for buffer in (touched for touched in call.touched - loose if touched not in self._memory):
                blocks[buffer] = reservation.take(recording.nbytes[buffer])
                self._memory[buffer] = blocks[buffer].untyped_storage()
            ended = [buffer for buffer in call.touched if last[buffer] == index]
            self._steps.append(self._step(call, [buffer for buffer in ended if buffer not in self._memory]))
            for buffer in ended:
                if buffer in blocks:
                    reservation.give_back(blocks.pop(buffer))

    def _is_there(self, call: Call) -> bool:
        """Whether a call copies something onto itself."""
        if call.operator is not aten.copy_.default or not all(
            place.buffer in self._memory for place in places(call.args)
        ):
            return False
        to, start = map(self._tensor, places(call.args))
        return to.is_set_to(start)

    def _step(self, call: Call, ended: list[int]) -> Callable[[], Any]:
        """A function that runs a call. ended: the loose results that are no longer needed afterwards."""
        writer, read = writer_of(call), self._arguments(call)
        results = [self._tensor(place) for place in call.results if place and place.buffer in self._memory]
        if writer and all(place.buffer in self._memory for place in places((call.args, call.kwargs))):
            args, kwargs = read()
            return writer(args, kwargs, results)

        def run() -> None:
            """Run the call, keep its loose results, and drop those that have ended."""
            args, kwargs = read()
            if writer:
                writer(args, kwargs, results)()
            else:
                result = call.operator(*args, **kwargs)
                for place, tensor in zip(call.results, [result] if call.one_result else result, strict=True):
                    if place is not None:
                        self._loose[place.buffer] = tensor
            for buffer in ended:
                self._loose.pop(buffer, None)

        return run

    def _arguments(self, call: Call) -> Callable[[], Any]:
        """A function for the arguments of a call, as tensors."""
        bound = mapped(Place, self._bound, (call.args, call.kwargs))
        return lambda: self._now(bound)

    def _tensor(self, place: Place) -> Tensor:
        return place.of(self._memory[place.buffer])

    def _bound(self, place: Place) -> Tensor | Place:
        """The tensor at a place; the place itself where its memory comes with each run."""
        return self._tensor(place) if place.buffer in self._memory else place

    def _now(self, bound: Any) -> Any:
        """Tensors, and places among them as the tensors of this run."""
        return mapped(Place, self._found, bound)

    def _found(self, place: Place) -> Tensor:
        """The tensor at a place whose memory this run made."""
        tensor = self._loose[place.buffer]
        same = tensor.shape == place.size and tensor.stride() == place.stride
        return tensor if same else tensor.as_strided(place.size, place.stride, place.offset)


def _shifted(by: int, place: Place) -> Place:
    return replace(place, offset=place.offset + by)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A program and its run, which may be captured: then it has the addresses of the program's memory, and no more.

    So the program lives as long as its run.
    """

    program: Program
    run: Run


class Programs:
    """Programs by key, each recorded on first use, and memory for their arguments.

    Functions that cannot be recorded, and those whose program fails its trial, are called each time. capture: turns a
    program's run into the one that is used from then on.
    """

    def __init__(self, device: torch.device, capture: Capture | None = None) -> None:
        self.device, self.captured = device, capture is not None
        self._workspace, self._capture = Workspace(device), capture or (lambda run: run)
        self._programs: dict[Hashable, _Ready | None] = {}  # None: called each time
        self._memory: dict[Hashable, Tensor] = {}
        self._bound: dict[Hashable, Any] = {}
        self._said = False

    def memory(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that is the same in every call with an equal key and a first axis that is not longer."""
        whole = self._memory.get((key, len(shape)))
        if whole is None or len(whole) < shape[0]:
            if whole is not None:  # programs know where the arguments were
                self._programs.clear()
                self._bound.clear()
                self._workspace = Workspace(self.device)
            whole = self._memory[key, len(shape)] = torch.empty(
                tuple(shape), dtype=dtype, device=self._workspace.device
            )
        return whole[: shape[0]]

    def hold(self, key: Hashable, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of vectors in such memory."""
        return {name: self.memory((key, name), vector.shape).copy_(vector) for name, vector in vectors.items()}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The cached result of `make` by key, until memory moves."""
        if key not in self._bound:
            value = make()  # which may move memory
            self._bound[key] = value
        bound: T = self._bound[key]
        return bound

    def run(
        self,
        key: Hashable,
        function: Callable[[], dict[str, Tensor]],
        arguments: Iterable[Tensor],
        targets: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """The results of a function, by name: some in `targets`, the rest valid until the next run.

        key: equal for the same function of the same arguments. arguments: all tensors that it reads and that change.
        """
        if key not in self._programs:
            self._programs[key], outputs = self._first_run(function, arguments, targets)
            return outputs
        ready = self._programs[key]
        return _called(function, targets) if ready is None else ready.run()

    def _first_run(
        self, function: Callable[[], dict[str, Tensor]], arguments: Iterable[Tensor], targets: Mapping[str, Tensor]
    ) -> tuple[_Ready | None, dict[str, Tensor]]:
        """The function's program after its trial, and outputs; if it fails, None and a call's outputs."""
        try:
            recording = record(function, arguments)
        except NotRecordable:
            self._say("the model or the algorithm reads values of tensors in Python, or makes shapes of them")
            return None, _called(function, targets)
        before = Before([*recording.overwritten, *(target.untyped_storage() for target in targets.values())])
        # A target takes values as they fit there.
        expected = {name: target.clone().copy_(recording.expected[name]) for name, target in targets.items()}
        with contextlib.suppress(Exception):  # any failure of a program: its function has just succeeded
            program = Program(recording, self._workspace, targets)
            self._workspace.spoil()
            outputs = program.run()
            if agree({**outputs, **targets}, recording.expected | expected) and before.same_around(targets.values()):
                return _Ready(program, self._capture(program.run)), outputs
        self._say("a recorded step gave something else than the step itself")
        before.put_back()
        return None, _called(function, targets)

    def _say(self, why: str) -> None:
        """Say once that steps are not run from recordings."""
        if not self._said:
            log.warning("%s, so steps are not recorded, and training takes longer than it could", why)
        self._said = True


def _called(function: Callable[[], dict[str, Tensor]], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The results of a function, some of them moved to targets."""
    outputs = function()
    # An output may be an argument, whose memory another output is to go to.
    written = {target.untyped_storage()._cdata for target in targets.values()}
    moved = {name: outputs.pop(name) for name in targets}
    moved = {
        name: tensor.clone() if tensor.untyped_storage()._cdata in written else tensor for name, tensor in moved.items()
    }
    for name, target in targets.items():
        target.copy_(moved[name])
    return outputs
