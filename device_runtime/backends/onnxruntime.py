"""ONNX Runtime on one CPU thread, and the check of a graph before it sees its bytes."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from device_runtime.backends.backend import Arrays, Edge, Executable, address
from device_runtime.errors import PlanRefused, RuntimeFailed
from fedcore.plan import MASK, PREDICT, steps_graph

# The check of an ONNX graph before ONNX Runtime sees its bytes. The rules: docs/spec/plan.md §2.1.
#
# A graph is untrusted data, and ONNX Runtime runs far more than a plan needs: endless loops, operators of other
# domains, tensors in files. So this module walks the protobuf bytes along a table of all fields that a plan's graph may
# have. No message of the table contains itself, so the table bounds the depth.

OPSET = 18
_LIST = """
    Abs Acos Add And Asin Atan Cast Ceil Clip Concat Conv ConvTranspose Cos CumSum Div Equal Erf Exp Expand Floor Gather
    GatherElements Gemm Greater GreaterOrEqual Identity Less LessOrEqual Log LogSoftmax MatMul Max MaxPool Min Mod Mul
    Neg Not Or Pad Pow Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Round ScatterElements
    ScatterND Shape Sigmoid Sign Sin Size Slice Softmax Split Sqrt Squeeze Sub Tanh Tile TopK Transpose Unsqueeze Where
"""
OPERATORS = frozenset(_LIST.split())
"""The operators that a plan may use, all of ONNX's own domain: those that the exporter writes, except the loop."""
# A loop must end: the last value that it scans is a vector whose bytes are in the graph, or the mask, which the device
# makes. Its body is a graph of nodes.
LOOP, BOUND = "Scan", MASK.encode()
# How many of its inputs a loop scans: of more than there are, some engines end the process.
SCANNED = b"num_scan_inputs"
# A loop scans only the first axis: the plan itself chooses the other axes of a batch.
AXES = "scan_input_axes"

# Operators that divide. Of integers, 0 and -1 as divisors may end the process, and an app's own process runs predict
# graphs.
DIVIDING = frozenset({b"Div", b"Mod"})
_FLOATS, _INTEGERS = frozenset({1, 11}), {2: "u1", 6: "<i4", 7: "<i8"}
# Element types by ONNX's numbers: float32, uint8, int32, int64, bool, float64.
ELEMENTS = frozenset({1, 2, 6, 7, 9, 11})
MOST_NODES = 100_000
MOST_FIELDS = 3_000_000

# Wire types of protobuf.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
# Kinds of fields: a number, an element type, a text, bytes or a list of numbers; any other is a message of that name.
_NUMBER, _ELEMENT, _TEXT, _BYTES = "number", "element", "text", "bytes"
_GRAPH = {
    1: ("node", "node"),
    2: ("name", _TEXT),
    5: ("initializer", "tensor"),
    11: ("input", "graph's input"),
    12: ("output", "value"),
    13: ("value_info", "value"),
}
_NODE = {
    1: ("input", _TEXT),
    2: ("output", _TEXT),
    3: ("name", _TEXT),
    4: ("op_type", _TEXT),
    5: ("attribute", "attribute"),
    7: ("domain", _TEXT),
}
_ATTRIBUTE = {
    1: ("name", _TEXT),
    2: ("f", _NUMBER),
    3: ("i", _NUMBER),
    4: ("s", _TEXT),
    7: ("floats", _BYTES),
    8: ("ints", _BYTES),
    20: ("type", _NUMBER),
}
_VALUE = {1: ("name", _TEXT), 2: ("type", "type")}
_FIELDS: Mapping[str, Mapping[int, tuple[str, str]]] = {
    "model": {
        1: ("ir_version", _NUMBER),
        2: ("producer_name", _TEXT),
        3: ("producer_version", _TEXT),
        7: ("graph", "graph"),
        8: ("opset_import", "opset"),
    },
    "opset": {1: ("domain", _TEXT), 2: ("version", _NUMBER)},
    "graph": _GRAPH,
    "node": _NODE,
    "attribute": {**_ATTRIBUTE, 6: ("g", "body")},
    "body": {1: ("node", "body's node"), 2: ("name", _TEXT), 11: ("input", "value"), 12: ("output", "value")},
    "body's node": {**_NODE, 5: ("attribute", "body's attribute")},
    "body's attribute": _ATTRIBUTE,
    "tensor": {
        1: ("dims", _BYTES),
        2: ("data_type", _ELEMENT),
        4: ("float_data", _BYTES),
        5: ("int32_data", _BYTES),
        7: ("int64_data", _BYTES),
        8: ("name", _TEXT),
        9: ("raw_data", _BYTES),
        10: ("double_data", _BYTES),
    },
    "graph's input": _VALUE,
    "value": _VALUE,
    "type": {1: ("tensor_type", "tensor type")},
    "tensor type": {1: ("elem_type", _ELEMENT), 2: ("shape", "shape")},
    "shape": {1: ("dim", "dimension")},
    "dimension": {1: ("dim_value", _NUMBER), 2: ("dim_param", _TEXT)},
}
# The fields of messages that give names to values.
_NAMES = {"node": "output", "tensor": "name", "graph's input": "name", "value": "name"}
_ALL_NAMES = {**_NAMES, "body's node": "output"}
_OPERATORS_IN = {"node.op_type": OPERATORS | {LOOP}, "body's node.op_type": OPERATORS}


def check_graph(graph: bytes, name: str) -> None:
    """Raise PlanRefused, naming the graph `name`, unless its bytes are an ONNX model that a plan may contain."""
    try:
        walk = _Walk(graph, many=name.endswith(steps_graph("")), predicts=name == PREDICT)
        walk.message("model", 0, len(graph))
        walk.check_opsets()
        walk.check_loops()
        walk.check_divisors()
    except _Unfit as error:
        raise PlanRefused(f"cannot load graph {name!r}: {error}") from error


_Places = dict[str, list[tuple[int, int, int]]]
"""By field of a message: the wire types of its contents, and where these begin and end."""


class _Unfit(Exception):
    """The reason to refuse a graph."""


class _Walk:
    """One walk over the bytes of a model. many: the graph takes many steps, so a loop may scan the mask.

    predicts: it is a predict graph, which may not divide by data.
    """

    def __init__(self, data: bytes, *, many: bool, predicts: bool) -> None:
        self._data, self._many, self._predicts = data, many, predicts
        self._nodes = self._fields = self._opsets = self._versions = 0
        # Names of values: the last one that each loop scans, those that bound a loop, and all others.
        self._looped, self._bounds, self._others = set[bytes](), set[bytes](), set[bytes]()
        self._scanned = 0
        """How many inputs the node that is being read goes over, as its attributes say."""
        # Names of divisors, of constants by which a graph may divide, and of all other values.
        self._divisors, self._safe, self._unsafe = set[bytes](), set[bytes](), set[bytes]()

    def check_opsets(self) -> None:
        """Raise _Unfit unless the model names exactly one operator set, with its version."""
        if self._opsets != 1 or self._versions != 1:
            raise _Unfit(f"it must import one opset with one version, not {self._opsets} with {self._versions}")

    def check_loops(self) -> None:
        """Raise _Unfit unless each loop of the model ends: all values that it scans have equally many rows."""
        if not self._looped <= self._bounds - self._others:
            raise _Unfit(
                f"the turns of a {LOOP} have no bound: its last input must be the mask of a graph of many steps, or an "
                "initializer of one dimension with its values in raw_data, and have a name of its own"
            )

    def check_divisors(self) -> None:
        """Raise _Unfit if a predict graph divides by anything but constants."""
        if self._predicts and not self._divisors <= self._safe - self._unsafe:
            raise _Unfit(
                "it divides by data: a predict graph may divide by an initializer with its values in raw_data, none of "
                "them the integers 0 and -1, and multiply by a Reciprocal"
            )

    def message(self, kind: str, at: int, end: int) -> None:
        """Check the message between two offsets."""
        self._nodes += f"{kind}.op_type" in _OPERATORS_IN
        self._opsets += kind == "opset"
        if self._nodes > MOST_NODES:
            raise _Unfit(f"it has more than {MOST_NODES:,} nodes")
        fields, places = _FIELDS[kind], _Places()
        for number, wire, start, stop in self._split(at, end):
            if number not in fields:
                raise _Unfit(f"its {kind} has a field {number} that a plan's graph does not have")
            field, inner = fields[number]
            places.setdefault(field, []).append((wire, start, stop))
            if inner in _FIELDS:
                if wire != _LENGTH:
                    raise _Unfit(f"{field} of its {kind} is no message")
                self.message(inner, start, stop)
            else:
                self._value(f"{kind}.{field}", inner, wire, start, stop)
        self._note(kind, places)

    def _note(self, kind: str, places: _Places) -> None:
        """Record the names that a message gives to values."""

        def texts(field: str) -> list[bytes]:
            return [self._data[start:stop] for _, start, stop in places.get(field, [])]

        if kind == "attribute" and SCANNED in texts("name"):
            numbers = [
                self._varint(at, end)[0] if wire == _VARINT else MOST_FIELDS for wire, at, end in places.get("i", [])
            ]
            self._scanned = max(self._scanned, *numbers, 0)
        if kind == "node":
            if texts("op_type")[-1:] == [LOOP.encode()]:
                self._note_loop(texts("input"))
            self._scanned = 0
        vector = kind == "tensor" and self._is_vector(places)
        for name in texts(_NAMES[kind]) if kind in _NAMES else ():
            bounds = vector or (self._many and kind == "graph's input" and name == BOUND)
            (self._bounds if bounds else self._others).add(name)
        if self._predicts:
            self._note_division(texts("op_type"), texts("input"))
            names = texts(_ALL_NAMES[kind]) if kind in _ALL_NAMES else ()
            (self._safe if kind == "tensor" and self._divides(places) else self._unsafe).update(names)

    def _note_loop(self, inputs: list[bytes]) -> None:
        if self._scanned > len(inputs):
            raise _Unfit(f"a {LOOP} goes over {self._scanned} inputs, and has {len(inputs)}")
        self._looped.add([b"", *inputs][-1])

    def _note_division(self, operators: list[bytes], inputs: list[bytes]) -> None:
        if DIVIDING.intersection(operators):
            self._divisors.add([*inputs, b"", b""][1])

    def _divides(self, places: _Places) -> bool:
        """Whether a tensor is of floats, or of integers other than 0 and -1."""
        if not places.keys() <= {"dims", "name", "data_type", "raw_data"}:  # values elsewhere
            return False
        match places:
            case {"data_type": [(_, int(at), int(end))], "raw_data": [(2, int(start), int(stop))]}:
                number, raw = self._varint(at, end)[0], self._data[start:stop]
                if number in _INTEGERS and len(raw) % np.dtype(_INTEGERS[number]).itemsize == 0:
                    values = np.frombuffer(raw, _INTEGERS[number]).astype(np.int64)
                    return not np.isin(values, (0, -1)).any()
                return number in _FLOATS
        return False

    def _is_vector(self, places: _Places) -> bool:
        """Whether a tensor has one dimension, and no more elements than bytes in the graph."""
        match places:
            case {"dims": [(int(wire), int(at), int(end))], "raw_data": [*_, (_, int(start), int(stop))]}:
                return wire == _VARINT and self._varint(at, end)[0] <= stop - start
        return False

    def _value(self, field: str, kind: str, wire: int, start: int, stop: int) -> None:
        if kind == _TEXT:
            self._text(field, wire, start, stop)
        elif kind == _ELEMENT or field == "opset.version":
            self._versions += kind == _NUMBER
            number = self._varint(start, stop)[0] if wire == _VARINT else None
            if kind == _ELEMENT and number not in ELEMENTS:
                raise _Unfit(f"{field} is {number}, which is no type of a plan's tensors")
            if kind == _NUMBER and number != OPSET:
                raise _Unfit(f"it is of opset {number}, a plan's graphs are of opset {OPSET}")

    def _text(self, field: str, wire: int, start: int, stop: int) -> None:
        try:
            text = self._data[start:stop].decode() if wire == _LENGTH else None
        except UnicodeDecodeError:
            text = None
        if text is None:
            raise _Unfit(f"{field} is not text in UTF-8")
        if text not in _OPERATORS_IN.get(field, {text}):
            raise _Unfit(f"operator {text!r} is none that a plan may use")
        if field == "attribute.name" and text == AXES:
            raise _Unfit(f"a {LOOP} goes over another axis than the first")
        if field.endswith(".domain") and text:
            raise _Unfit(f"{field} is {text!r}, a plan's operators are ONNX's own")

    def _split(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """The fields of a message: number, wire type, and the offsets where their content begins and ends."""
        while at < end:
            self._fields += 1
            if self._fields > MOST_FIELDS:
                raise _Unfit(f"it has more than {MOST_FIELDS:,} fields")
            tag, start = self._varint(at, end)
            wire = tag & 7
            if wire == _VARINT:
                _, at = self._varint(start, end)
            elif wire == _LENGTH:
                size, start = self._varint(start, end)
                at = start + size
            elif wire in _WIDTHS:
                at = start + _WIDTHS[wire]
            else:
                raise _Unfit(f"there is no wire type {wire}")
            if at > end:
                raise _Unfit("a field ends behind its message")
            yield tag >> 3, wire, start, at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """The number at an offset, and the offset after it."""
        value, shift = 0, 0
        for place in range(at, min(at + 10, end)):
            byte = self._data[place]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, place + 1
            shift += 7
        raise _Unfit("a number does not end")


# Set before the import, which would otherwise open a telemetry store, give this machine an id and start a thread.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"


KEPT = 4
# Larger graphs are loaded without a plan for their buffers.
PLANNED_BYTES = 128 * 1024
# An arena hands out a piece that is up to twice as large as wanted, unless more than this would be left of it.
LEFT_BYTES = 64 * 1024


def module_of(name: str) -> ModuleType:
    """A module of ONNX Runtime's own, such as its quantiser, loaded after its telemetry is turned off."""
    return importlib.import_module(name)


class OnnxRuntime:
    """The backend of ONNX graphs. alone: whether this process does nothing else, and may keep memory to its end."""

    format = "onnx"
    runtime = f"onnxruntime {onnxruntime.__version__}"

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone

    def load(self, graph: bytes, name: str = "graph") -> Executable:
        """Prepare a graph. Raises PlanRefused when a plan may not contain it, or ONNX Runtime cannot read it."""
        check_graph(graph, name)
        options = _options(len(graph))
        if self._alone and len(graph) > PLANNED_BYTES:
            _share_arena()
            options.add_session_config_entry("session.use_env_allocators", "1")
        # ONNX Runtime's statuses are exceptions without a common base, and its own texts need not be UTF-8.
        try:
            session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            return _Graph(session, name)
        except Exception as error:
            raise PlanRefused(f"ONNX Runtime cannot load graph {name!r}: {error}") from error


class _Graph:
    """A session with the bindings of the last few sets of arrays.

    A device loop alternates between two, and as many again where the last call of an epoch takes fewer steps.
    """

    def __init__(self, session: onnxruntime.InferenceSession, name: str) -> None:
        self._session = session
        inputs, outputs = (
            frozenset(node.name for node in some()) for some in (session.get_inputs, session.get_outputs)
        )
        self._edge = Edge(name, inputs, outputs)
        # A kept binding references its arrays, so their addresses stay valid and an id always means the same array.
        self._kept: dict[tuple[object, ...], tuple[onnxruntime.IOBinding, list[NDArray[Any]]]] = {}

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Compute `outputs` from `inputs`: see Executable. Bindings of known arrays are reused."""
        self._edge.check_names(inputs, outputs)
        arrays = [*(inputs[name] for name in self._edge.wanted), *outputs.values()]
        key = (*map(id, arrays), *outputs)
        if key not in self._kept:
            self._edge.check_memory(inputs, outputs)
        try:
            if key not in self._kept:
                if len(self._kept) == KEPT:
                    self._kept.clear()
                self._kept[key] = self._bind(inputs, outputs), arrays
            self._session.run_with_iobinding(self._kept[key][0])
        except Exception as error:
            raise RuntimeFailed(f"graph {self._edge.name!r} failed", str(error)) from error

    def _bind(self, inputs: Arrays, outputs: Arrays) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        for name in self._edge.wanted:
            array = inputs[name]
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, address(array))
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, address(array))
        return binding


@functools.cache
def _share_arena() -> None:
    """Make an arena that large graphs share: it leaves less unused than one of their own, and gives nothing back."""
    kinds = onnxruntime.OrtAllocatorType, onnxruntime.OrtMemType
    memory = onnxruntime.OrtMemoryInfo("Cpu", kinds[0].ORT_ARENA_ALLOCATOR, 0, kinds[1].DEFAULT)
    settings = onnxruntime.OrtArenaCfg({"max_dead_bytes_per_chunk": LEFT_BYTES})
    onnxruntime.create_and_register_allocator(memory, settings)


def _options(size: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    # The last level rearranges images for convolutions whose weights are constants; ours are inputs.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    # One block for a whole step holds more memory than the arena, which frees as it goes.
    options.enable_mem_pattern = False
    # Planning which buffers to use again takes time quadratic in the operators: seconds for an unrolled LSTM.
    options.enable_mem_reuse = size <= PLANNED_BYTES
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # A graph must be self-contained. ONNX lets a tensor name a file, and this path is no folder, so none can be read.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.log_severity_level = 4  # errors arrive as exceptions; logging them would report them twice
    return options
