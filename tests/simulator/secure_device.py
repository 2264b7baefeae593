"""A device process of a secure round, with a recorder beside it, which dies where a test wants it to."""

from __future__ import annotations

from pathlib import Path

import msgspec

import device_runtime.protocol.secure  # noqa: F401  # loaded once, before devices are forked
from device_runtime.backends import BACKENDS, open_backend
from device_runtime.config import DeviceConfig
from device_runtime.permission.policy import Policy
from device_runtime.session import run_session
from device_runtime.trainer import InProcess
from simulator.fleet.faults import EmulatedDevice, PlannedDeath, PlannedFailure, Recorder, connect

BACKENDS["onnxruntime"]()


def be_device(folder: Path, url: str, signer: str, dies: tuple[str, int] | None = None) -> None:
    """One session under the releases of a signer; the process is killed before or after message `dies[1]`."""
    recorder = Recorder(folder / "recorded")
    recorder.record_quantised()
    failure = PlannedFailure(dies_at=PlannedDeath(dies[1], sent=dies[0] == "after")) if dies else PlannedFailure()
    config = DeviceConfig(
        coordinator=url,
        population="p",
        examples=folder / "examples.npz",
        state=folder / "state",
        policy=Policy(signers=(signer,)),
        trainer=lambda name: InProcess(open_backend(name)),
        connect=connect(EmulatedDevice(), failure, recorder),
    )
    (folder / "outcome.json").write_bytes(msgspec.json.encode(run_session(config)))
