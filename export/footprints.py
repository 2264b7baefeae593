"""The footprint of exported graphs, measured in a process without torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from export.errors import ParityFailed
from fedcore.bundle import Footprint
from fedcore.decoding import decoder
from fedcore.plan import BlobRef, Plan

_FOOTPRINT = decoder(Footprint)


def footprint(plan: Plan, form: str, graphs: Mapping[BlobRef, bytes]) -> Footprint:
    """The footprint of a plan's graphs of the format `form` on this machine.

    graphs: serialised, also those of other formats. Raises ParityFailed when the graphs do not run.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "plan.json").write_bytes(plan.encode())
        for ref in plan.graphs[form].values():
            (folder / ref.sha256).write_bytes(graphs[ref])
        done = measured_alone(folder, form)
    if done.returncode:
        raise ParityFailed(f"the {form} graphs do not run by themselves: {done.stderr.decode().strip()[-500:]}")
    return _FOOTPRINT.decode(done.stdout)


def measured_alone(folder: Path, form: str) -> subprocess.CompletedProcess[bytes]:
    """A run of `device_runtime.capabilities` for the plan in a folder, and its graphs of the format `form`."""
    command = [sys.executable, "-m", "device_runtime.capabilities", str(folder), form]
    return subprocess.run(command, capture_output=True, check=False)
