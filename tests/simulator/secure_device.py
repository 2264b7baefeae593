"""A device process that writes down what it quantised and said in a secure round, and dies where a test wants it to."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

import device_runtime.secure  # noqa: F401  # loaded once, before devices are forked
from device_runtime.backends import BACKENDS
from device_runtime.session import DeviceConfig, run_session
from device_runtime.transport import Transport
from secagg import packing

BACKENDS["onnxruntime"]()


class Witness(Transport):
    """The real road; `folder` gets what is said, and the process is killed before or after message `dies[1]`."""

    folder: Path
    dies: tuple[str, int] | None

    def say(self, assignment, number, message, wait_s):
        if self.dies == ("before", number):
            os.kill(os.getpid(), signal.SIGKILL)
        said = self.folder / f"{assignment}.said.{number}"
        said.with_name(f"{said.name}.{os.getpid()}").write_bytes(message)
        answer = super().say(assignment, number, message, wait_s)
        if self.dies == ("after", number):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def connect(folder, dies, url):
    road = Witness.to(url)
    road.folder, road.dies = folder, dies
    return road


def be_device(folder: Path, url: str, dies: tuple[str, int] | None = None) -> None:
    """One session. `quantised.json` and `quantised.npy` hold the last words before they were masked."""
    quantise = packing.encode

    def witnessed(segments, vector_D, weight, w_max):
        words = quantise(segments, vector_D, weight, w_max)
        terms = {"segments": [dataclasses.asdict(segment) for segment in segments], "w_max": w_max}
        (folder / "quantised.json").write_text(json.dumps(terms))
        np.save(folder / "quantised.npy", words)
        return words

    packing.encode = witnessed
    config = DeviceConfig(
        coordinator=url,
        population="p",
        examples=folder / "examples.npz",
        state=folder / "state",
        connect=partial(connect, folder, dies),
    )
    (folder / "outcome.json").write_bytes(msgspec.json.encode(run_session(config)))
