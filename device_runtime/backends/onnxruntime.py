"""ONNX Runtime on one CPU thread, reading and writing the caller's NumPy buffers in place."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType
from typing import Any

# Set before the import, which would otherwise open a telemetry store, give this machine an id and start a thread.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime
from numpy.typing import NDArray

from device_runtime.backends.backend import Arrays, Edge, Executable, address
from device_runtime.backends.onnx_check import check_graph
from device_runtime.errors import PlanRefused, RuntimeFailed

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
