"""The process that trains for a device: it receives one order over a socket, sends one answer, and ends.

    python -m device_runtime.sandbox.child DESCRIPTOR DEVICE

DEVICE is the id of the device's process; this process ends with it. Before it reads a graph, it permanently gives up
all rights that training does not need (confinement.py), and limits its memory and time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import numpy.random  # noqa: F401  # otherwise loaded with the first batch, when no file can be opened any more

from device_runtime.backends import open_backend
from device_runtime.errors import DeviceError
from device_runtime.runner import TrainingResult
from device_runtime.sandbox import kernel
from device_runtime.sandbox.channel import ORDER, Broken, Channel, Done, Failed, Order, Working
from device_runtime.sandbox.confinement import confine
from device_runtime.trainer import InProcess, Job
from fedcore.plan import Plan

# Seconds between two messages that the training continues.
TELL_EVERY_S = 0.05


def end_with(device: int) -> None:
    """On Linux, have the kernel kill this process when the device's process ends."""
    if sys.platform == "linux":
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != device:  # it ended before that
        sys.exit(1)


def train(channel: Channel) -> TrainingResult:
    """Carry out the order from the channel. Raises DeviceError as a Trainer does, ConfigError, or Broken."""
    order = channel.receive(ORDER)
    backend = open_backend(order.backend)
    job = _job(order, channel)
    told = 0.0

    def tell() -> bool:
        nonlocal told
        now = time.monotonic()
        if now - told >= TELL_EVERY_S:
            channel.send(Working(time.process_time()))
            told = now
        return True

    return InProcess(backend, confine).train(job, order.limits, tell)


def _job(order: Order, channel: Channel) -> Job:
    return Job(
        plan=Plan.decode(bytes(order.plan)),
        graphs={name: channel.receive_bytes(size) for name, size in order.graphs.items()},
        broadcast={kind.name: channel.receive_array(kind) for kind in order.broadcast},
        frozen={kind.name: channel.receive_array(kind) for kind in order.frozen},
        kept=None if order.kept is None else {kind.name: channel.receive_array(kind) for kind in order.kept},
        examples={kind.name: channel.receive_array(kind) for kind in order.examples},
        left_out={kind.name: channel.receive_array(kind) for kind in order.left_out},
        key=order.key,
    )


def main() -> None:
    """Serve the socket that the command line names. If the device is gone, end silently."""
    descriptor, device = map(int, sys.argv[1:])
    end_with(device)
    kernel.hide_memory()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        result = train(channel)
        channel.send(Done(result.steps))
        for vector in (result.values, *result.kept.values()):
            channel.send_bytes(vector)
    except Broken:
        sys.exit(1)
    except DeviceError as error:
        channel.send(Failed(type(error).__name__, error.detail, error.private))
    except Exception as error:
        channel.send(Failed("RuntimeFailed", "the device's own code failed", type(error).__name__))


if __name__ == "__main__":
    main()
