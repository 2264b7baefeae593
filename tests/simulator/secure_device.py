"""A device process of a secure round, with a recorder beside it, which dies where a test wants it to.

The recorder notes what the device quantised, sent and revealed, to check sums; the runtime must record none of it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

import device_runtime.protocol.secure  # noqa: F401  # loaded once, before devices are forked
from device_runtime.backends import BACKENDS, open_backend
from device_runtime.config import DeviceConfig
from device_runtime.permission.policy import Policy
from device_runtime.protocol.transport import Transport
from device_runtime.session import run_session
from device_runtime.trainer import InProcess
from secagg import packing
from secagg.encoding import MessageType
from secagg.messages import Unmask
from simulator.fleet.faults import SECAGG_MESSAGE, DyingTransport, PlannedDeath

BACKENDS["onnxruntime"]()
SESSION = slice(2, 34)
"""The bytes of a message that name its session."""
ENCODE = packing.encode


def be_device(folder: Path, url: str, signer: str, dies: tuple[str, int] | None = None) -> None:
    """One session under the releases of a signer; the process is killed before or after message `dies[1]`."""
    recorded = folder / "recorded"
    recorded.mkdir(parents=True, exist_ok=True)
    quantised = {}

    def encode(segments, vector_D, weight, w_max, new_key=packing.fresh_key):
        words = ENCODE(segments, vector_D, weight, w_max, new_key)
        terms = json.dumps([[asdict(segment) for segment in segments], w_max])
        quantised.update(words=words.copy(), terms=np.array(terms))
        return words

    def over(carrier):
        recording = RecordingTransport(carrier, recorded, quantised)
        return DyingTransport(recording, PlannedDeath(dies[1], sent=dies[0] == "after")) if dies else recording

    packing.encode = encode
    config = DeviceConfig(
        coordinator=url,
        population="p",
        examples=folder / "examples.npz",
        state=folder / "state",
        policy=Policy(signers=(signer,)),
        trainer=lambda name: InProcess(open_backend(name)),
        connect=partial(Transport.to, over=over),
    )
    (folder / "outcome.json").write_bytes(msgspec.json.encode(run_session(config)))


class RecordingTransport:
    """A carrier that records what was quantised once it is sent masked, and shares before they are sent."""

    def __init__(self, carrier, folder, quantised):
        self._carrier, self._folder, self._quantised, self.close = carrier, folder, quantised, carrier.close
        # A session that continues a killed one should send the same again: both are kept.
        self._session = f"{os.getpid()}-{time.time_ns()}"

    def send(self, request):
        match = SECAGG_MESSAGE.search(request.target) if request.method == "PUT" else None
        if match is None:
            return self._carrier.send(request)
        body, assignment = b"".join(request.body), match["assignment"]
        if int(match["number"]) == MessageType.MASKED and self._quantised:
            np.savez(self._folder / f"{assignment}.quantised.npz", **self._quantised)
        if int(match["number"]) == MessageType.UNMASK:
            (self._folder / f"{assignment}.shares.{self._session}").write_bytes(body)
        return self._carrier.send(replace(request, body=[body]))


class Quantised(NamedTuple):
    """A report before masking: words (W,), and the segments and largest weight that decode them."""

    words: np.ndarray
    segments: tuple[packing.PackedSegment, ...]
    w_max: int


def quantised_in(folder: Path, assignment: str) -> Quantised:
    """The report that an assignment's device below a folder quantised last."""
    (path,) = folder.rglob(f"recorded/{assignment}.quantised.npz")
    with np.load(path) as file:
        segments, w_max = json.loads(file["terms"].item())
        return Quantised(file["words"], tuple(packing.PackedSegment(**segment) for segment in segments), w_max)


def shares_in(folder: Path):
    """The assignment, the session and the shares (kind and share, by position of their owner) in every M11 sent."""
    for path in sorted(folder.rglob("recorded/*.shares.*")):
        message = path.read_bytes()
        session = message[SESSION]
        yield path.name.rsplit(".", 2)[0], session, Unmask.decode(message, session).shares
