"""What an engine must do: load a graph, and run it on buffers that the caller owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


class Executable(Protocol):
    """A loaded graph. Not to be shared between threads."""

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Compute `outputs` from `inputs`, writing straight into the output arrays.

        Arrays are C-contiguous and no output shares memory with an input. Inputs that the graph does not read are
        ignored. The arrays of the last calls may stay referenced. Raises PlanRefused when the graph wants an
        input or lacks an output of these names; RuntimeFailed when an array does not fit or an operator fails.
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
