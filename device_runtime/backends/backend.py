"""The interface of an engine: load a graph, and run it on buffers that the caller owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from device_runtime.errors import PlanRefused

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Edge:
    """The inputs and outputs of the graph `name`, by name. Every engine checks them before it runs a graph."""

    name: str
    wanted: frozenset[str]
    offered: frozenset[str]

    def check_names(self, inputs: Arrays, outputs: Arrays) -> None:
        """Raise PlanRefused when an input is missing, or the graph has no such output."""
        if self.wanted <= inputs.keys() and outputs.keys() <= self.offered:
            return
        wants, lacks = sorted(self.wanted - inputs.keys()), sorted(outputs.keys() - self.offered)
        raise PlanRefused(
            f"graph {self.name!r} wants inputs {wants} that the plan does not name, lacks outputs {lacks} that it does"
        )

    def check_memory(self, inputs: Arrays, outputs: Arrays) -> None:
        """Raise ValueError when an array cannot be bound in place, or an output shares memory with an input.

        An operator may write its output before another reads the input, which would make the result silently wrong.
        """
        read = {name: inputs[name] for name in self.wanted}
        for array in (*read.values(), *outputs.values()):
            if not (array.flags.c_contiguous and array.flags.aligned):
                raise ValueError("an array bound to a graph must be C-contiguous and aligned")
        for name, output in outputs.items():
            for wanted, array in read.items():
                if np.may_share_memory(output, array):
                    raise ValueError(f"output {name!r} of graph {self.name!r} shares memory with input {wanted!r}")


def address(array: NDArray[Any]) -> int:
    """The address of an array's first value."""
    begin: int = array.__array_interface__["data"][0]
    return begin


class Executable(Protocol):
    """A loaded graph. Not to be shared between threads."""

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Compute `outputs` from `inputs`, writing straight into the output arrays.

        Arrays are C-contiguous and no output shares memory with an input. Inputs that the graph does not read are
        ignored. The engine may keep references to the arrays of the last calls. Raises PlanRefused when the graph needs
        another input or lacks one of the outputs; RuntimeFailed when an array does not fit or an operator fails.
        """


class Backend(Protocol):
    """An engine for graphs of one `format`; `runtime` is its name and version, for the coordinator's statistics."""

    @property
    def format(self) -> str:
        """The key of this engine's graphs in a plan."""

    @property
    def runtime(self) -> str:
        """Name and version."""

    def load(self, graph: bytes, name: str = "graph") -> Executable:
        """Prepare a graph; errors call it `name`. Raises PlanRefused when this engine cannot read it."""
