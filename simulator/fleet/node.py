"""Devices in TypeScript: the Node process that runs a fleet's devices, and its requirements on this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import device_runtime
from simulator.errors import FleetError

FOLDER = Path(device_runtime.__file__).parent / "js"
_FLEET = FOLDER / "src" / "node" / "fleet.ts"


def fleet_command() -> list[str]:
    """The command line of a process that runs many devices, as a fork server does. Raises FleetError."""
    return [program(), "--no-warnings", str(_FLEET)]


def program() -> str:
    """The path of Node, if it can run the device runtime in TypeScript. Raises FleetError, saying what is missing."""
    if not _FLEET.exists():
        raise FleetError(f"there is no device runtime in TypeScript at {FOLDER}: run this from a checkout of Muster")
    path = shutil.which("node")
    is_new = [path or "", str(FOLDER / "node-is-new.cjs")]
    if path is None or subprocess.run(is_new, check=False, capture_output=True).returncode != 0:
        what = f"{path} is older" if path else "there is none on the PATH"
        raise FleetError(
            f"devices on Node need Node 22.18 or newer, and {what}: `npm install --global node@24` has one"
        )
    if not (FOLDER / "node_modules" / ".package-lock.json").exists():
        raise FleetError(f"devices on Node need their packages: `npm ci --prefix {FOLDER}` installs them")
    return path
